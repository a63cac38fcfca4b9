"""statistics and monitor for JAX: numbers against NumPy, no executable and no wait."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import COMPILED, jax_events

from xla_amp.jax import LossScale, monitor, statistics

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


def test_a_monitor_adds_no_executable_and_no_wait():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grads, statistics(grads, loss=loss)

    recorder, w, x = monitor(), jnp.array(W[0]), jnp.array(X)
    w, found = step(w, x)
    recorder.record(found)
    with jax_events() as events:
        with jax.transfer_guard_device_to_host("disallow"):  # but for explicit copies, which do not wait
            for _ in range(3):
                w, found = step(w, x)
                recorder.record(found)
        assert len(recorder.read().steps) == 4
    assert COMPILED not in events


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
