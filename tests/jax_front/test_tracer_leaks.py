"""`jax.check_tracer_leaks` reports no leak of autocast, so a user can look for leaks of the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xla_amp.jax import autocast

W, X = jnp.ones((8, 8)) / 3, jnp.ones((4, 8))


@jax.custom_vjp
def product(x):
    return jnp.tanh(x @ W)


product.defvjp(lambda x: (product(x), x), lambda x, g: (g @ W.T,))


@jax.custom_jvp
def squashed(x):
    return jnp.tanh(x)


squashed.defjvp(lambda p, t: (squashed(p[0]), t[0] * (1 - squashed(p[0]) ** 2)))


def linear(x, w):
    return jax.custom_derivatives.linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, w, x)


PROGRAMS = {
    "scan": lambda x, w: lax.scan(lambda c, v: (jnp.tanh(c @ v @ w), c.sum()), x, jnp.stack([w, w]))[0],
    "checkpoint": lambda x, w: jax.checkpoint(lambda x: jax.nn.gelu(x @ w) @ w)(x),
    "cond": lambda x, w: lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jnp.tanh(x), x),
    "while": lambda x, w: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x),
    "custom_vjp": lambda x, w: product(x) @ w,
    "custom_jvp": lambda x, w: squashed(x @ w) @ w,
    "linear_call": linear,
    "custom_vmap": lambda x, w: jax.vmap(jax.custom_batching.sequential_vmap(lambda x: x @ W))(x),
    "jit": lambda x, w: jax.jit(lambda x: jax.jit(jnp.tanh)(x @ w) * 2)(x) @ w,
    "island": lambda x, w: jax.nn.softmax(jax.nn.standardize(x @ w)) @ w,
}


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_tracer_outlives_its_trace(name):
    def loss(x, w):
        return PROGRAMS[name](x, w).sum()

    def outer(x, w):
        return autocast(loss)(x, w)

    calls = [jax.jit(outer), autocast(loss)]
    if name == "linear_call":  # JAX has its derivative in the other argument only
        calls += [jax.jit(jax.grad(outer)), jax.jit(autocast(jax.grad(loss)))]
    elif name != "custom_vmap":  # JAX has no backward pass of it
        calls += [jax.jit(autocast(jax.grad(loss, 1))), jax.jit(jax.grad(outer, 1)), jax.grad(outer, 1)]
    with jax.check_tracer_leaks():
        for call in calls:
            call(X, W)


@pytest.mark.full
def test_a_leak_of_the_program_is_found():
    kept = []

    def leaks(x):
        kept.append(x @ W)
        return kept[-1]

    with pytest.raises(Exception, match="Leaked"), jax.check_tracer_leaks():
        jax.jit(autocast(leaks))(X)
