"""Products of 8-bit floats with scales of rows and of blocks, against float64, and as XLA compiles them for GPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_amp.lowering.linalg.float8 import BLOCK, FORMATS, float8_contract
from xla_amp.stablehlo.tools import targets

ROWS, DEPTH, COLUMNS = 24, 96, 32
SHARED = {"row": DEPTH, "block": BLOCK}
"""Scaling -> elements that share a scale."""


@functools.partial(jax.jit, static_argnames=("scaling", "platform"))
def multiply(x, w, scaling, platform="cpu"):
    formats = ("e4m3", "e4m3")
    return float8_contract(x, w, ((1,), (0,)), formats=formats, scaling=scaling, platform=platform)


def exact(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def random(rng, rows: int, shared: int) -> jax.Array:
    """(rows, DEPTH): what shares a scale has a magnitude of its own, from 1e-6 to 1e6."""
    scale = 10.0 ** rng.uniform(-6, 6, (rows, DEPTH // shared, 1))
    return jnp.asarray(
        (rng.standard_normal((rows, DEPTH // shared, shared)) * scale).reshape(rows, DEPTH), jnp.bfloat16
    )


def bound(x: np.ndarray, shared: int) -> np.ndarray:
    """The error of each element of (rows, DEPTH): half a step, of the digits of e4m3 or of its smallest numbers."""
    blocks = np.abs(x.reshape(len(x), -1, shared))
    step = 2.0**-9 * blocks.max(-1, keepdims=True) / (float(jnp.finfo(FORMATS["e4m3"].dtype).max) / 2)
    return np.maximum(2.0**-4 * blocks, step / 2).reshape(x.shape)


@pytest.mark.parametrize("scaling", SHARED)
def test_each_row_or_block_has_the_digits_of_the_format(scaling) -> None:
    rng, shared = np.random.default_rng(0), SHARED[scaling]
    for _ in range(20):
        x, w = random(rng, ROWS, shared), random(rng, COLUMNS, shared)
        a, b = exact(x), exact(w)
        ea, eb = bound(a, shared), bound(b, shared)
        allowed = ea @ np.abs(b).T + np.abs(a) @ eb.T + ea @ eb.T + 1e-6 * (np.abs(a) @ np.abs(b).T)
        error = np.abs(np.asarray(multiply(x, w.T, scaling), np.float64) - a @ b.T)
        assert (error <= allowed).all()
        assert error.max() > 0.001 * allowed.max()
    one_scale = np.abs(np.asarray(multiply(x, w.T, "tensor"), np.float64) - a @ b.T)
    assert (one_scale > allowed).any()  # which a scale for the whole operand does not give


@pytest.mark.parametrize("scaling", SHARED)
def test_zeros_infinities_and_empty_operands(scaling) -> None:
    rng = np.random.default_rng(1)
    x, w = random(rng, ROWS, DEPTH), random(rng, COLUMNS, DEPTH).T
    plain = np.asarray(multiply(x, w, scaling))
    for bad in (np.inf, -np.inf, np.nan):
        found = np.asarray(multiply(x.at[3, 5].set(bad), w, scaling))
        assert not np.isfinite(found[3]).any()
        np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(plain, 3, 0))
    assert not np.asarray(multiply(0 * x, w, scaling)).any()
    for rows, depth, columns in ((0, 32, 16), (16, 0, 16), (16, 32, 0)):
        found = multiply(jnp.ones((rows, depth), jnp.bfloat16), jnp.ones((depth, columns), jnp.bfloat16), scaling)
        assert found.shape == (rows, columns)
        assert not np.asarray(found).any()


@pytest.mark.parametrize("scaling", SHARED)
def test_batches_in_any_order_of_axes(scaling) -> None:
    rng = np.random.default_rng(2)
    x, w = random(rng, 3 * ROWS, DEPTH).reshape(3, ROWS, DEPTH), random(rng, 3 * COLUMNS, DEPTH).reshape(3, -1, DEPTH)
    both = {"formats": ("e4m3", "e4m3"), "scaling": scaling, "platform": "cpu"}
    found = float8_contract(x.transpose(2, 0, 1), w, ((0,), (2,)), ((1,), (0,)), **both)
    for index in range(3):
        np.testing.assert_array_equal(found[index], multiply(x[index], w[index].T, scaling))


def test_a_block_that_is_not_whole_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"in blocks of 32 sums over 48 elements"):
        multiply(jnp.ones((16, 48), jnp.bfloat16), jnp.ones((48, 16), jnp.bfloat16), "block")


@pytest.mark.parametrize(
    ("target", "scaling", "call"),
    [
        ("h100", "row", "__cublas$lt$matmul$f8"),
        ("b200", "row", "__cublas$lt$matmul$f8"),
        ("b200", "block", "__cudnn$blockScaledDot"),
    ],
)
def test_gpus_get_a_product_of_8_bit_operands(target, scaling, call) -> None:
    if not targets.available(target):
        pytest.skip(f"the compiler for {target} is not installed")
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((40, 64), (64, 32)))
    module = targets.lower(functools.partial(multiply, scaling=scaling, platform="gpu"), x, w, target=target)
    assert targets.compile_for(module, target).hlo.count(f'custom_call_target="{call}"') == 1
