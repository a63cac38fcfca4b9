"""The loss-scale formula and all its users against torch's kernel."""

from __future__ import annotations

import importlib.util
import itertools
import random
from pathlib import Path

import jax
import numpy as np
import torch
from harness import called

import xla_amp
from xla_amp.common import loss_scaling
from xla_amp.jax import LossScale
from xla_amp.jax.loss_scale import SMALLEST

ROOT = Path(loss_scaling.__file__).parents[1]


def torch_xla_kernels():
    """`xla_amp.engines.torch_xla.amp_kernels`, whose package imports torch_xla; the module itself only torch."""
    specification = importlib.util.spec_from_file_location("kernels", ROOT / "engines/torch_xla/amp_kernels.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


amp_kernels = torch_xla_kernels()


def torch_update(value, tracker, found_inf, growth, backoff, interval):
    """torch's own kernel, on CPU."""
    values = torch.tensor(value, dtype=torch.float32), torch.tensor(tracker, dtype=torch.int32)
    torch._amp_update_scale_(*values, torch.tensor(float(found_inf)), growth, backoff, interval)
    return values[0].item(), values[1].item()


def schedules(count=40, smallest=-126):
    """Random runs: (factors, start, overflow of each step).  In half of them float32 does not hold the factors."""
    source = random.Random(3)
    for number in range(count):
        exact = number % 4 == 0
        growth = source.choice([2.0, 4.0, 1.5]) if exact else source.choice([1.7, source.uniform(1.01, 3.0)])
        backoff = source.choice([0.5, 0.25, 0.75]) if exact else source.choice([0.3, source.uniform(0.1, 0.99)])
        start = source.choice([1.0, 2.0**16, 2.0**126, 2.0**smallest, source.uniform(1, 2) * 2.0**20])
        probability = source.choice([0.0, 0.05, 0.5])
        overflows = [source.random() < probability for _ in range(60)]
        yield (growth, backoff, source.randint(1, 7)), start, overflows


def run(step, factors, start, overflows):
    value, tracker, trace = float(np.float32(start)), 0, []
    for overflow in overflows:
        value, tracker = step(value, tracker, float(overflow), *factors)
        trace.append((float(value), int(tracker)))
    return trace


def torch_xla_step(value, tracker, found_inf, *factors):
    """The kernel for torch_xla, which is made of torch operations, on the CPU."""
    tensors = torch.tensor([value]), torch.tensor([tracker], dtype=torch.int32)
    assert amp_kernels.update_scale(*tensors, torch.tensor(found_inf), *factors) is tensors[0]
    return tensors[0].item(), tensors[1].item()


def test_random_schedules_equal_torch_bit_for_bit():
    for factors, start, overflows in schedules():
        assert run(torch_xla_step, factors, start, overflows) == run(torch_update, factors, start, overflows), factors


def test_lowering_equals_torch_bit_for_bit():
    source = random.Random(4)
    rows = []
    for _ in range(80):
        value = np.float32(2.0 ** source.uniform(-60, 127.99))
        interval = source.randint(1, 3)
        factors = (source.choice([1.7, 2.0, source.uniform(1, 3)]), source.choice([0.3, source.uniform(0.1, 1)]))
        flag = float(source.random() < 0.5)
        rows.append((float(value), source.randint(0, 2), flag, *factors, interval))
    scales = ((65536.0, 1999), (65536.0, 5), (2.0**127, 1999), (2.0**-149, 3), (0.1, 1999))
    choices = itertools.product(scales, (0.0, 1.0), ((2.0, 0.5), (1.7, 0.3)))
    rows += [(*scale, flag, *factors, 2000) for scale, flag, factors in choices]
    device, results = xla_amp.xla_device(), []
    for value, tracker, flag, *factors in rows:
        arrays = torch.tensor([value]), torch.tensor([tracker], dtype=torch.int32), torch.tensor([flag])
        results.append(called("_amp_update_scale_", (*arrays, *factors), {}, device))
    xla_amp.sync()
    assert [tuple(tensor.item() for tensor in pair) for pair in results] == [torch_update(*row) for row in rows]


def test_loss_scale_equals_torch_bit_for_bit():
    """`xla_amp.jax.LossScale` keeps its factors as float32, so torch gets the rounded ones."""
    step = jax.jit(LossScale.update)
    compared = 0
    for factors, start, overflows in schedules(160, smallest=-60):
        rounded = (float(np.float32(factors[0])), float(np.float32(factors[1])), factors[2])
        theirs = run(torch_update, rounded, start, overflows)
        if not all(SMALLEST <= value <= 2.0**126 for value, _ in theirs):  # bounds of `LossScale`
            continue
        names = ("growth_factor", "backoff_factor", "growth_interval")
        state = LossScale.dynamic(float(np.float32(start)), **dict(zip(names, factors, strict=True)))
        ours = []
        for overflow in overflows:
            state = step(state, not overflow)
            ours.append((float(state.value), int(state.growth_tracker)))
        assert ours == theirs, factors
        compared += 1
    assert compared >= 20


def test_defaults_are_torchs():
    ours = (loss_scaling.INITIAL, loss_scaling.GROWTH_FACTOR, loss_scaling.BACKOFF_FACTOR, loss_scaling.GROWTH_INTERVAL)
    theirs = torch.amp.GradScaler("cpu")
    assert ours == (
        theirs.get_scale(),
        theirs.get_growth_factor(),
        theirs.get_backoff_factor(),
        theirs.get_growth_interval(),
    )
