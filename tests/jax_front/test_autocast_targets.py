"""One transformer block's training step, cross-compiled for a TPU v6e and an H100."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
import targets
from networks_jax import Block

from xla_amp.jax import autocast

pytestmark = pytest.mark.timeout(900)  # three compilations for TPU in one test, on a machine that may be busy

BATCH, LENGTH, WIDTH = 8, 256, 512


def block(dtype=None):
    return Block(heads=8, dtype=dtype)


def step(model, wrap):
    """Loss, gradients and a gradient descent step of one block; `wrap` is applied to the loss."""

    @wrap
    def loss(weights, x):
        return jnp.mean(model.apply(weights, x).astype(jnp.float32) ** 2)

    def run(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return value, jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients)

    return run


def same(function):
    return function


STEPS = {
    "float32": step(block(), same),
    "written by hand": step(block(jnp.bfloat16), same),
    "autocast": step(block(), functools.partial(autocast, policy="tpu")),
    "autocast of the whole step": autocast(step(block(), same), policy="tpu"),
}


@pytest.fixture(scope="module")
def compiled():
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    zeros = jnp.zeros((1, LENGTH, WIDTH))
    weights = jax.eval_shape(lambda key: block().init(key, zeros), jax.random.key(0))
    with targets.Compilers() as compilers:

        @functools.cache
        def compile_for(target, name):
            if not targets.available(target):
                pytest.skip(f"the compiler for {target} is not installed")
            return compilers.compile(targets.lower(STEPS[name], weights, x, target=target), target)

        yield compile_for


@pytest.mark.full
def test_on_v6e_it_costs_what_the_hand_written_model_costs(compiled):
    by_hand, wide = (compiled("v6e", each) for each in ("written by hand", "float32"))
    for name in ("autocast", "autocast of the whole step"):
        ours = compiled("v6e", name)
        for quantity in ("seconds", "bytes_accessed"):
            assert getattr(ours, quantity) <= 1.02 * getattr(by_hand, quantity), name
            assert getattr(ours, quantity) <= 0.75 * getattr(wide, quantity), name
        assert {dtypes[:2] for dtypes in ours.contractions()} == {("bfloat16", "bfloat16")}, name


@pytest.mark.full
@pytest.mark.parametrize("name", ["autocast", "autocast of the whole step"])
def test_on_h100_every_product_is_low_and_weights_get_float32(compiled, name):
    ours = compiled("h100", name).contractions()
    wide = compiled("h100", "float32").contractions()
    assert {dtypes[:2] for dtypes in ours} == {("bfloat16", "bfloat16")}
    assert sum(ours.values()) == sum(wide.values()) == 20
    assert ours["bfloat16", "bfloat16", "float32"] == 6  # q, k, v, out, two dense layers
