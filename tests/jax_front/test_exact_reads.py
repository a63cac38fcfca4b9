"""Products that are counted, compared, rounded, ordered or returned keep their float32 sums, on JAX and StableHLO."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest
from contractions import contractions
from jax import lax

from xla_amp import stablehlo
from xla_amp.jax import autocast

M = jnp.stack([jnp.arange(1000) < 751, jnp.arange(1000) < 1000]).astype(jnp.float32)
"""Zeros and ones, which bfloat16 holds; 751 of them it does not."""

EXACT: dict[str, Any] = {
    "an integer": lambda m: (m @ m.T).astype(jnp.int32),
    "positions in an expert": lambda m: (m @ jnp.triu(jnp.ones((1000, 1000)))).astype(jnp.int32),
    "above a number": lambda m: (m @ m.T) > 750.0,
    "equal to a number": lambda m: (m @ m.T) == 751,
    "a number of another function": lambda m: jax.jit(lambda a, most: a > most)(m @ m.T, 750.3),
    "above an argument": lambda m: (m @ m.T) > 1000 * m[1, 0] - 249.5,
    "a rounded count, in a product": lambda m: (jnp.round(m @ m.T) - 700) @ jnp.eye(2),
    "floor": lambda m: jnp.floor(m @ m.T),
    "sorted": lambda m: jnp.sort((m @ m.T).ravel()),
    "argmax": lambda m: jnp.argmax(jnp.stack([m[:, :750] @ m.T[:750], m @ m.T])[:, 0, 0]),
    "top_k": lambda m: lax.top_k((m @ m.T).ravel(), 2)[0],
    "searched": lambda m: jnp.searchsorted((m @ m.T).ravel()[1:], jnp.array([750.5, 751.5])),
    "the result": lambda m: m @ m.T,
    "a result of a function": lambda m: jax.jit(lambda a: a @ a.T)(m).astype(jnp.int32),
    "checkpoint": lambda m: jax.checkpoint(lambda a: a @ a.T)(m).astype(jnp.int32),
    "scanned": lambda m: lax.scan(lambda c, x: (c, x @ m.T), 0, jnp.stack([m, m]))[1].astype(jnp.int32),
    "carried": lambda m: lax.scan(lambda c, x: (x @ m.T, None), jnp.zeros((2, 2)), jnp.stack([m, m]))[0],
    "counted in a loop": lambda m: lax.fori_loop(0, m[1, 0].astype(int) + 1, lambda i, c: m @ m.T, jnp.zeros((2, 2))),
    "one of two": lambda m: lax.cond(m[0, 0] > 0, lambda: m @ m.T, lambda: m @ m[::-1].T).astype(jnp.int32),
    "mapped": lambda m: jax.vmap(lambda row: (row @ m.T).astype(jnp.int32))(m),
    "the largest": lambda m: jnp.max(jnp.clip((m @ m.T).T, 0, 999)).astype(jnp.int32),
    "relu": lambda m: jax.nn.relu(m @ m.T),
}
ROUNDED: dict[str, Any] = {
    "another product reads it": lambda m: (m @ m.T, (m @ m.T)[:, :1].T @ m),
    "tanh": lambda m: jnp.tanh(m @ m.T),
    "a low number": lambda m: (m @ m.T).astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", EXACT)
def test_float32_sums_are_read(name: str) -> None:
    function = EXACT[name]
    expected = jax.tree.leaves(function(M))
    run = jax.jit(autocast(function, dtype="bfloat16"))
    assert "bf16" in run.lower(M).as_text()
    converted = stablehlo.autocast(jax.jit(function).lower(M), dtype="bfloat16")
    assert "bf16" in converted.text()
    for found in (run(M), module_runs.run(converted.module, [np.asarray(M)])):
        for one, other in zip(jax.tree.leaves(found), expected, strict=True):
            np.testing.assert_array_equal(one, other)


def products(function: Any, *args: Any) -> list[str]:
    """dtypes of the results of a program's products."""
    text = str(jax.make_jaxpr(autocast(function, dtype="bfloat16"))(*args))
    return [line.split("out=")[1].strip() for line in text.splitlines() if line.strip().startswith("out=")]


def test_other_readers_get_a_low_result() -> None:
    assert products(ROUNDED["tanh"], M) == ["bfloat16"]
    assert products(ROUNDED["a low number"], M) == ["bfloat16"]
    assert products(lambda m: (m @ m.T, jnp.tanh(m @ m.T)), M) == ["float32", "bfloat16"]
    both = lambda m: (lambda c: (c > 750, c @ m))(m @ m.T)  # noqa: E731 - one product, two readers
    assert products(both, M) == ["bfloat16", "float32"]


def test_a_number_is_not_rounded_by_a_comparison() -> None:
    def function(x: Any) -> Any:
        h = jnp.tanh(x @ x)
        return h @ x, h > 0.3, jax.jit(lambda h, n: h <= n)(h, 0.3), jnp.maximum(h, 0.3) @ x, h > 0.5

    jaxpr = str(jax.make_jaxpr(autocast(function, dtype="bfloat16"))(jnp.ones((8, 8))))
    assert "0.30000001192092896:f32[]" in jaxpr.split(" gt ")[1]
    assert "0.5:bf16[]" in jaxpr.split(" gt ")[2]  # which bfloat16 holds
    x = jnp.full((2, 1), 0.5) * jnp.arange(1.0, 3.0)
    low = jnp.asarray(0.30078125, jnp.bfloat16)  # the nearest number of bfloat16 to 0.3
    compared = autocast(lambda x: (x @ jnp.eye(2)).astype(jnp.bfloat16).astype(jnp.float32) > 0.3, dtype="bfloat16")
    assert bool(compared(x.at[0, 0].set(low))[0, 0])


def test_training_is_as_low_as_before() -> None:
    """A network without biases, whose logits are its result: its products stay low, and its gradients are right."""

    def logits(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x) @ w
        return x

    def loss(params: Any, x: Any, y: Any, model: Any = logits) -> Any:
        return jnp.mean((model(params, x) - y) ** 2)

    draw = np.random.default_rng(0).standard_normal
    params = [draw((32, 32), np.float32) / 6 for _ in range(3)]
    x, y = draw((16, 32), np.float32), draw((16, 32), np.float32)
    low = autocast(logits, dtype="bfloat16")
    around = lambda p, x, y: loss(p, x, y, low)  # noqa: E731 - the loss outside of the region
    exact = jax.jit(jax.grad(loss))(params, x, y)
    for gradient in (jax.grad(around), jax.grad(autocast(loss)), autocast(jax.grad(loss))):
        # The last product's is the one gradient with regard to data more than three weights need.
        assert contractions(gradient, params, x, y) == {("bf16", "bf16"): 8}
        for found, expected in zip(jax.jit(gradient)(params, x, y), exact, strict=True):
            assert found.dtype == jnp.float32
            assert float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)) < 0.01
    results = products(jax.grad(loss), params, x, y)
    assert results.count("float32") == 3  # the gradients of weights
