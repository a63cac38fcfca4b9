"""Contraction primitives: forms by platform, derivatives in both modes and of second order, batching, masters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from xla_amp.jax import autocast
from xla_amp.jax.low_primitives import contract_low, low_copy

BF16 = jnp.dtype(jnp.bfloat16)


def array(*shape, seed=0):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), jnp.float32)


def equation(function, *args):
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return eqn


def low(eqn, left, right, *rest, master=True, out=BF16):
    """The equation's contraction of data and a weight, as autocast binds it."""
    operands = [left.astype(BF16), low_copy(right, BF16) if master else right, *rest]
    return contract_low(eqn.primitive, operands, (None, right if master else None), eqn.params, low=BF16, out=out)


CASES = {
    "matrix": (lambda x, w: x @ w, (4, 8), (8, 3)),
    "vector": (lambda x, w: x @ w, (8,), (8, 3)),
    "inner": (lambda x, w: x @ w, (8,), (8,)),
    "outer": (lambda x, w: lax.dot_general(x, w, (((), ()), ((), ()))), (4,), (5,)),
    "ranks 3 and 2": (lambda x, w: lax.dot_general(x, w, (((2,), (0,)), ((), ()))), (2, 4, 8), (8, 3)),
    "two contracted": (lambda x, w: lax.dot_general(x, w, (((0, 1), (0, 1)), ((), ()))), (2, 4, 8), (2, 4, 3)),
    "first axes": (lambda x, w: lax.dot_general(x, w, (((0,), (0,)), ((), ()))), (4, 8), (4, 3)),
    "batch": (lambda x, w: lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,)))), (2, 4, 8), (2, 8, 3)),
    "inner batch": (lambda x, w: lax.dot_general(x, w, (((1,), (2,)), ((2,), (0,)))), (4, 8, 2), (2, 3, 8)),
    "convolution": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (2, 3, 6, 6), (4, 3, 3, 3)),
    "strided": (lambda x, w: lax.conv(x, w, (2, 2), "VALID"), (2, 3, 7, 7), (4, 3, 3, 3)),
}


FULL = ("vector", "inner", "outer", "first axes")  # the others have their axes, one by one


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if n in FULL else []) for n in CASES])
def test_values_and_derivatives_are_those_of_the_contraction(name):
    function, left, right = CASES[name]
    x, w = array(*left), array(*right, seed=1)
    eqn = equation(function, x, w)
    direction = array(*eqn.outvars[0].aval.shape, seed=2)

    def everything(contract):
        def loss(x, w):
            return jnp.sum(contract(x, w).astype(jnp.float32) * direction)

        def batched(x, w):
            return jax.vmap(contract, (0, None))(jnp.stack([x, 2 * x]), w).astype(jnp.float32)

        return jax.jit(
            lambda x, w: {
                "forward": contract(x, w),
                "grad": jax.grad(loss, (0, 1))(x, w),
                "jvp": jax.jvp(loss, (x, w), (w[..., :1].sum() * x, w))[1],
                "batched": batched(x, w),
                "grad of batched": jax.grad(lambda x, w: jnp.sum(batched(x, w) * direction), (0, 1))(x, w),
                "batched weights": jax.vmap(jax.grad(loss, 1), (None, 0))(x, jnp.stack([w, -w])),
                "hessian": jax.jvp(jax.grad(lambda x: loss(jnp.tanh(x), w)), (x,), (x,))[1],
            }
        )(x, w)

    found, expected = everything(lambda x, w: low(eqn, x, w)), everything(function)
    assert found["forward"].dtype == BF16
    for part, value in found.items():
        for one, other in zip(jax.tree.leaves(value), jax.tree.leaves(expected[part]), strict=True):
            error = np.linalg.norm(np.asarray(one, np.float64) - other) / np.linalg.norm(other)
            assert error < 2e-2, part
    assert found["grad"][1].dtype == jnp.float32


def test_gradients_of_masters_are_not_rounded():
    x, w = array(64, 8), array(8, 4, seed=1)
    eqn = equation(lambda x, w: x @ w, x, w)

    def gradient(master):
        return jax.grad(lambda w: jnp.sum(low(eqn, x, w if master else w.astype(BF16), master=master)))(w)

    exact = np.asarray(x.astype(BF16), np.float64).T @ np.ones((64, 4))
    assert np.abs(gradient(True) - exact).max() < 1e-5
    assert np.abs(gradient(False) - exact).max() > 1e-3  # a gradient that passed through bfloat16


def test_the_form_is_that_of_the_platform_it_is_lowered_for():
    x, w = array(2, 4, 8), array(8, 3)
    eqn = equation(lambda x, w: lax.dot_general(x, w, (((2,), (0,)), ((), ()))), x, w)
    traced = jax.jit(jax.grad(lambda w: jnp.sum(low(eqn, x, w)))).trace(w)

    def dots(platform):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return [line.split(" : ")[-1] for line in text.splitlines() if "dot_general" in line]

    # low x low -> low forward, and the accumulator itself for the weight
    for platform in ("tpu", "cuda"):
        assert [line.endswith("xf32>") for line in dots(platform)] == [True]
        assert all(line.count("bf16") == 2 for line in dots(platform))
    both = jax.jit(lambda w: (low(eqn, x, w), jax.grad(lambda w: jnp.sum(low(eqn, x, w)))(w))).trace(w)
    tpu = both.lower(lowering_platforms=("tpu",)).as_text()
    cpu = both.lower(lowering_platforms=("cpu",)).as_text()
    assert tpu.count("-> tensor<2x4x3xbf16>") > 0
    # XLA:CPU: the accumulator, rounded afterwards, matrices with the left contracted axis last
    assert all(line.endswith("xf32>") for line in dots("cpu"))
    assert all("contracting_dims = [1] x" in line for line in cpu.splitlines() if "dot_general" in line)


# Second derivatives: a weight that contractions read as a low copy keeps its part in them.  float16 rounds to 2**-11,
# so a derivative within 2 % of float32's has all of its terms; without those between two layers a quarter is missing.

X = jax.random.normal(jax.random.key(3), (8, 16))
SEQUENCE = jax.random.normal(jax.random.key(4), (5, 8, 16))


def weights(*shapes):
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


def test_a_gradient_that_a_product_reads_is_stored_low_on_a_gpu():
    # XLA:GPU would write the float32 number before the rounding for the gradient of the bias, and the low one as well.
    x, w, b = array(8, 16), array(16, 32), array(32)

    def loss(w, b, x):
        return jax.nn.gelu(x @ w + b).sum()

    run = jax.jit(jax.grad(autocast(loss, dtype="bfloat16"), (0, 1)))
    barriers = {}
    for platform in ("tpu", "cuda", "rocm"):
        text = run.trace(w, b, x).lower(lowering_platforms=(platform,)).as_text()
        barriers[platform] = [
            line for line in text.splitlines() if "optimization_barrier" in line and "8x32xbf16" in line
        ]
    assert [*map(len, barriers.values())] == [0, 1, 1], barriers
    forward = jax.jit(autocast(loss, dtype="bfloat16")).trace(w, b, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "optimization_barrier" not in forward  # of the values, none: they may stay in a fusion
