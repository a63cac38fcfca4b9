"""The loss-scale formula against torch's kernel and in every array library it may meet."""

from __future__ import annotations

import doctest
import random

import numpy as np
import pytest

from xla_amp import loss_scaling
from xla_amp.loss_scaling import LARGEST, update

torch = pytest.importorskip("torch")


def torch_update(value, tracker, found_inf, growth, backoff, interval):
    """torch's own kernel, on CPU."""
    values = torch.tensor(value, dtype=torch.float32), torch.tensor(tracker, dtype=torch.int32)
    torch._amp_update_scale_(*values, torch.tensor(float(found_inf)), growth, backoff, interval)
    return values[0].item(), values[1].item()


def schedules():
    """Random runs: (factors, start, overflow of each step).  Factors that float32 holds exactly give equal results."""
    source = random.Random(3)
    for number in range(40):
        exact = number % 2 == 0
        growth = source.choice([2.0, 4.0, 1.5]) if exact else source.uniform(1.01, 3.0)
        backoff = source.choice([0.5, 0.25, 0.75]) if exact else source.uniform(0.1, 0.99)
        start = source.choice([1.0, 2.0**16, 2.0**126, 2.0**-120])
        probability = source.choice([0.0, 0.05, 0.5])
        overflows = [source.random() < probability for _ in range(60)]
        yield exact, (growth, backoff, source.randint(1, 7)), start, overflows


def run(step, factors, start, overflows):
    value, tracker, trace = start, 0, []
    for overflow in overflows:
        value, tracker = step(value, tracker, float(overflow), *factors)
        trace.append((float(value), int(tracker)))
    return trace


def same(ours, theirs, exact):
    trackers = [tracker for _, tracker in ours] == [tracker for _, tracker in theirs]
    # Rounding the factor to float32 costs at most 2^-24 per step, and so does each product: 60 steps, 2^-17.
    tolerance = 0 if exact else 2.0**-17
    return trackers and all(abs(a - b) <= tolerance * abs(b) for (a, _), (b, _) in zip(ours, theirs, strict=True))


def numpy_step(value, tracker, found_inf, *factors):
    with np.errstate(over="ignore"):
        return update(np.asarray(value, np.float32), np.asarray(tracker, np.int32), np.float32(found_inf), *factors)


def torch_step(value, tracker, found_inf, *factors):
    tensors = torch.as_tensor(value), torch.as_tensor(tracker, dtype=torch.int32), torch.tensor(found_inf)
    return update(*tensors, *factors, where=torch.where)


def float_step(value, tracker, found_inf, *factors):
    new, tracker = update(value, tracker, found_inf, *factors)
    with np.errstate(over="ignore"):
        return float(np.float32(new)), tracker  # a Python float has more digits than a float32 scale


STEPS = {"float": float_step, "numpy": numpy_step, "torch": torch_step}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_random_schedules_equal_torch(step):
    for exact, factors, start, overflows in schedules():
        assert same(run(step, factors, start, overflows), run(torch_update, factors, start, overflows), exact)


def test_random_schedules_equal_torch_under_jit():
    jax = pytest.importorskip("jax")
    step = jax.jit(update)

    def jax_step(value, tracker, found_inf, *factors):
        return step(np.float32(value), np.int32(tracker), np.float32(found_inf), *factors)

    compared = 0
    for exact, factors, start, overflows in schedules():
        theirs = run(torch_update, factors, start, overflows)
        if compared < 10 and min(value for value, _ in theirs) >= 2.0**-126:  # XLA flushes smaller numbers to zero
            assert same(run(jax_step, factors, start, overflows), theirs, exact)
            compared += 1
    assert compared == 10
    new = step(np.float32(8), np.int32(0), np.float32(0), 2.0, 0.5, 2000)
    assert [str(value.dtype) for value in new] == ["float32", "int32"]


@pytest.mark.parametrize("wrong", ["late growth", "tracker kept", "no bound"])
def test_the_comparison_finds_wrong_formulas(wrong):
    def step(value, tracker, found_inf, growth, backoff, interval):
        if wrong == "no bound" and not found_inf and tracker + 1 == interval:
            return value * growth, 0
        new, new_tracker = float_step(value, tracker, found_inf, growth, backoff, interval + (wrong == "late growth"))
        return new, tracker if wrong == "tracker kept" and found_inf else new_tracker

    cases = list(schedules())
    agree = [same(run(step, factors, start, flags), run(torch_update, factors, start, flags), exact)
             for exact, factors, start, flags in cases]  # fmt: skip
    assert not all(agree)


def test_the_scale_never_leaves_the_finite_range():
    for make in (float, np.float32):
        value, tracker = make(LARGEST), 0
        where = None if make is float else np.where
        with np.errstate(over="ignore"):
            for _ in range(5):
                value, tracker = update(value, tracker, make(0), 2.0, 0.5, 1, where=where)
        assert value == make(LARGEST)
        assert tracker == 0
    assert update(LARGEST / 2, 0, 0.0, 2.0, 0.5, 1) == (LARGEST, 0), "the largest float32 itself is allowed"


def test_an_overflow_lowers_the_scale_at_the_top_too():
    assert update(LARGEST, 4, 1.0, 2.0, 0.5, 5) == (LARGEST * 0.5, 0)


def test_dtypes_are_kept():
    new, tracker = update(np.array(4.0, np.float32), np.array(0, np.int32), np.array(1.0, np.float32))
    assert (new.dtype, tracker.dtype) == (np.float32, np.int32)
    new, tracker = torch_step(torch.tensor(4.0), 0, 0.0, 2.0, 0.5, 1)
    assert (new.dtype, tracker.dtype) == (torch.float32, torch.int32)
    assert (new.item(), tracker.item()) == (8.0, 0)


def test_an_array_without_a_namespace_needs_where():
    with pytest.raises(TypeError, match=r"torch.Tensor.*names no array namespace; pass where="):
        update(torch.tensor(4.0), torch.tensor(0), torch.tensor(0.0))


def test_defaults_are_torchs():
    ours = (loss_scaling.INITIAL, loss_scaling.GROWTH_FACTOR, loss_scaling.BACKOFF_FACTOR, loss_scaling.GROWTH_INTERVAL)
    theirs = torch.amp.GradScaler("cpu")
    assert ours == (
        theirs.get_scale(),
        theirs.get_growth_factor(),
        theirs.get_backoff_factor(),
        theirs.get_growth_interval(),
    )


def test_examples_in_the_docstrings():
    result = doctest.testmod(loss_scaling)
    assert result.failed == 0
    assert result.attempted > 0
