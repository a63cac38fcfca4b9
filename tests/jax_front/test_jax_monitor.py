"""statistics and monitor for JAX: numbers against NumPy, no executable and no wait, and the kept step."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xla_amp.errors import FileError, StepError
from xla_amp.jax import LossScale, autocast, find_overflow, monitor, select, skip_nonfinite, statistics, value_and_grad
from xla_amp.tools.monitor.on_jax import load

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((3, 8, 8)).astype(np.float32)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_numbers_are_those_of_numpy(transform):
    grads = {"h": [W[0].astype(jnp.bfloat16), X], "head": {"kernel": W[1], "count": 3}}
    layers = {"h": {"out": X.astype(np.float16)}, "empty": np.zeros((0, 2), np.float32)}

    def step(grads, layers, loss):
        return statistics(grads, loss=loss, loss_scale=LossScale.dynamic(8.0), skipped=loss > 1, layers=layers)

    recorder = monitor()
    recorder.record(transform(step)(grads, layers, jnp.float16(0.5)))
    (record,) = recorder.read().steps
    leaves = np.concatenate([np.ravel(np.asarray(each, np.float64)) for each in (grads["h"][0], X, W[1])])
    assert record.gradient_norm == pytest.approx(np.linalg.norm(leaves), rel=1e-6)
    assert record.largest == {"empty": 0.0, "h.out": np.abs(X.astype(np.float16)).max()}
    assert (record.loss, record.loss_scale, record.skipped, record.nonfinite, record.bad) == (
        0.5,
        8.0,
        False,
        (),
        False,
    )


def test_parameters_that_are_not_finite_are_named(recwarn):
    recorder = monitor()
    grads = {"a": jnp.array([1.0, jnp.nan]), "b": jnp.array([jnp.inf]), "c": jnp.array([1e18])}
    recorder.record(statistics(grads, layers={"x": jnp.array([1.0, -jnp.inf]), "y": jnp.array([jnp.nan])}))
    (record,) = recorder.read().steps
    assert (record.step, record.nonfinite, record.bad) == (0, ("a", "b"), True)
    assert record.largest["x"] == math.inf
    assert math.isnan(record.largest["y"])
    assert str(recwarn[0].message) == (
        "monitor: step 0 is bad: the first layer with an inf or NaN is x; not finite are the gradients of a, b (2 "
        "parameters). Type xla_amp.jax.find_overflow(step, *arguments) to find the operation"
    )


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(50, 8, name="wte")(tokens)
        x = nn.relu(nn.Dense(8, name="up")(x))
        return nn.Dense(1, name="head")(nn.Dense(8, name="scores")(x))[..., 0].mean()


NET, TX = Net(), optax.sgd(1e-3, momentum=0.9)
TOKENS = jnp.arange(12).reshape(4, 3)
BAD, RARE = 7, 49


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def train_step(params, opt_state, loss_scale, key, batch):
    out = value_and_grad(autocast(NET.apply, dtype=jnp.float16))(loss_scale, params, batch)
    updates, new_state = TX.update(out.grads, opt_state, params)
    new = optax.apply_updates(params, updates)
    found = statistics(out.grads, loss=out.value, loss_scale=loss_scale, skipped=~out.finite)
    return select(out.finite, new, params), select(out.finite, new_state, opt_state), out.loss_scale, found


@functools.cache
def drawn():
    shapes = jax.eval_shape(NET.init, jax.random.key(0), TOKENS)
    params = jax.tree.map(lambda each: 0.3 + np.cos(np.arange(each.size)).reshape(each.shape) / 4, shapes)
    params = jax.tree.map(np.float32, params)
    params["params"]["wte"]["embedding"][RARE] = 6e4  # overflows in the layer after it
    return params


def start():
    params = jax.tree.map(jnp.array, drawn())  # copies, which a step donates
    return [params, TX.init(params), LossScale.dynamic(1024.0)]


def arguments(number):
    return jax.random.key(number), TOKENS if number != BAD else TOKENS.at[2, 1].set(RARE)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose step `BAD` overflows: its monitor, and its state before that step."""
    recorder, state = monitor(directory=tmp_path_factory.mktemp("run")), start()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(10):
            if number == BAD:
                before = jax.tree.map(np.asarray, state)
            *state, found = train_step(*state, *arguments(number))
            recorder.record(found, *state, *arguments(number))
    (line,) = [str(each.message) for each in said if "is bad" in str(each.message)]
    assert line.startswith(f"monitor: step {BAD} is bad: the loss is nan; not finite are the gradients of params.")
    assert f"xla_amp.jax.find_overflow(step, *arguments, kept={str(recorder.kept)!r}) to find" in line
    return recorder, before


def test_the_first_bad_step_is_kept_with_the_state_before_it(run):
    recorder, before = run
    assert recorder.read().of("skipped") == recorder.history.of("bad") == [number == BAD for number in range(10)]
    assert recorder.history.steps[BAD].nonfinite[0].startswith("params.")
    *state, scale, key, batch = load(recorder.kept, (*start(), jax.random.key(0), TOKENS))
    jax.tree.map(np.testing.assert_array_equal, state, list(before[:2]))
    assert float(scale.value) == 1024.0
    assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.key(BAD)).tolist()
    np.testing.assert_array_equal(batch, arguments(BAD)[1])


def test_find_overflow_runs_the_step_on_what_was_kept(run):
    recorder, _ = run
    found = find_overflow(train_step, *start(), jax.random.key(0), TOKENS, kept=recorder.kept)
    assert found.first.place.module == "Net.up"
    assert found.first.element[:2] == (2, 1)  # of the batch, and the token


def test_what_does_not_fit_is_named(run, tmp_path):
    recorder, _ = run
    with pytest.raises(
        StepError, match=r"pass the step's arguments, in any values; expected float32\[1\], .*, got int32"
    ):
        find_overflow(train_step, TOKENS, kept=recorder.kept)
    with pytest.raises(FileError, match=r"no step of xla_amp\.jax\.monitor is kept here"):
        find_overflow(train_step, *start(), jax.random.key(0), TOKENS, kept=tmp_path)


def test_a_monitor_adds_no_executable_and_no_wait():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    recorder, state = monitor(), start()
    *state, found = train_step(*state, *arguments(0))
    recorder.record(found)
    jax.block_until_ready(state)
    given, before = [arguments(1)] * 3, len(compiled)
    with jax.transfer_guard_device_to_host("disallow"):  # but for explicit copies, which do not wait
        for each in given:
            *state, found = train_step(*state, *each)
            recorder.record(found)
    assert len(recorder.read().steps) == 4
    assert len(compiled) == before


def test_skip_nonfinite_guards_and_a_growth_probe_is_no_bad_step(tmp_path):
    optimizer = skip_nonfinite(optax.sgd(0.1), loss_scale=LossScale.dynamic(2.0**13, growth_interval=2))

    @jax.jit
    def step(w, state, x):
        scale = state.loss_scale
        grads = jax.grad(lambda w: scale.scale(jnp.sum(w.astype(jnp.float16) * x)))(w)
        updates, state = optimizer.update(grads, state, w)
        found = statistics(scale.unscale(grads), loss_scale=scale, skipped=~state.finite)
        return optax.apply_updates(w, updates), state, found

    recorder, w = monitor(directory=tmp_path), jnp.ones(())
    state = optimizer.init(w)
    for _ in range(6):
        w, state, found = step(w, state, jnp.float16(4.0))
        recorder.record(found, w, state, jnp.float16(4.0))
    assert any(recorder.read().of("skipped"))
    assert recorder.kept is None


def test_a_step_without_a_guard_is_not_kept_and_that_is_said_once(tmp_path, recwarn):
    recorder = monitor(directory=tmp_path)
    for value in (1.0, math.inf):
        recorder.record(statistics({"w": jnp.full(2, value)}), jnp.ones(2))
    assert recorder.read().of("bad") == [False, True]
    assert (recorder.kept, list(tmp_path.iterdir())) == (None, [])
    unguarded, bad = [str(each.message) for each in recwarn]
    assert "nothing guards the update" in unguarded
    assert "xla_amp.jax.statistics(..., skipped=~finite)" in unguarded
    assert bad.endswith("Type xla_amp.jax.find_overflow(step, *arguments) to find the operation")


def test_a_bad_step_without_its_arguments_does_not_end_the_run(tmp_path, recwarn):
    recorder = monitor(directory=tmp_path)
    recorder.record(statistics({"w": jnp.ones(2)}, skipped=jnp.asarray(True)))
    assert "it could not be kept: ValueError: monitor.record(statistics, *arguments) was given no" in str(
        recwarn[0].message
    )


class _Numbers:
    """A device's array that notes whether it may be copied to the host."""

    def __init__(self, count: int) -> None:
        self.allowed: list[object] = []
        self._values = np.zeros(count, np.float32)

    def copy_to_host_async(self) -> None:
        self.allowed.append(jax.config.jax_transfer_guard_device_to_host)

    def is_ready(self) -> bool:
        return True

    def __array__(self, *_: object) -> np.ndarray:
        self.copy_to_host_async()
        return self._values


def test_the_monitors_own_copy_is_allowed_where_the_program_forbids_copies():
    made, recorder = statistics({"w": X}), monitor()
    numbers = _Numbers(len(made.names))
    found = dataclasses.replace(made, numbers=numbers)
    with jax.transfer_guard("disallow"):
        recorder.record(found)
        recorder.read()
    assert numbers.allowed == ["allow", "allow"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: monitor().record({"loss": 1.0}), "expected what xla_amp.jax.statistics.* returned .* got dict"),
        (lambda: jax.jit(lambda x: monitor().record(statistics(x)))(X), r"outside of jax\.jit"),
    ],
)
def test_wrong_arguments_are_named(call, said):
    with pytest.raises(TypeError, match=said):
        call()
