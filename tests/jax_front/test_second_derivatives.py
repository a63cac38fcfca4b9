"""Second derivatives: a weight that contractions read as a low copy keeps its part in them.

float16 rounds to 2**-11, so a derivative within 2 % of float32's has all of its terms; one that loses the terms between
two layers differs by a quarter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from xla_amp.jax import autocast

X = jax.random.normal(jax.random.key(3), (8, 16))
SEQUENCE = jax.random.normal(jax.random.key(4), (5, 8, 16))


def weights(*shapes: tuple[int, ...]) -> list[Any]:
    return [jax.random.normal(jax.random.key(i), shape) * 0.3 for i, shape in enumerate(shapes)]


def mlp(parameters):
    a, b, c = parameters
    return jnp.mean(jnp.tanh(jnp.tanh(X @ a) @ b @ c) ** 2)


def recurrent(parameters):
    (w, u) = parameters

    def cell(carry, x):
        w, h = carry
        return (w, jnp.tanh(h @ w + x @ u)), None

    (_, h), _ = lax.scan(cell, (w, jnp.zeros((8, 16))), SEQUENCE)
    return jnp.mean((h @ h.T) ** 2)


MODELS = {
    "mlp": (mlp, weights((16, 32), (32, 32), (32, 4))),
    "recurrent": (recurrent, weights((16, 16), (16, 16))),
    "mlp, layers checkpointed": (lambda p: jax.checkpoint(mlp)(p), weights((16, 32), (32, 32), (32, 4))),
}


def inner(one, other):
    return sum(jnp.vdot(a, b) for a, b in zip(one, other, strict=True))


MODES = {
    "forward over reverse": lambda f, p, v: jax.jvp(jax.grad(f), (p,), (v,))[1],
    "reverse over reverse": lambda f, p, v: jax.grad(lambda p: inner(jax.grad(f)(p), v))(p),
    "reverse over forward": lambda f, p, v: jax.grad(lambda p: jax.jvp(f, (p,), (v,))[1])(p),
    "autocast around": lambda f, p, v: jax.jvp(jax.grad(f), (p,), (v,))[1],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_hessian_times_a_vector(name, mode):
    loss, parameters = MODELS[name]
    direction = [jax.random.normal(jax.random.key(9), each.shape) for each in parameters]
    product = MODES[mode]
    if mode == "autocast around":
        run = autocast(lambda p: product(loss, p, direction), dtype="float16")
    else:
        low = autocast(loss, dtype="float16")
        run = lambda p: product(low, p, direction)  # noqa: E731 - one of two
    expected, _ = ravel_pytree(jax.jit(lambda p: product(loss, p, direction))(parameters))
    given, _ = ravel_pytree(jax.jit(run)(parameters))
    assert float(jnp.linalg.norm(given - expected) / jnp.linalg.norm(expected)) < 0.02
