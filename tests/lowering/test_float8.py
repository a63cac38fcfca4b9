"""Products of 8-bit floats against float64, at all scales, and as XLA compiles them for GPUs."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets

from xla_amp.lowering import Permuted
from xla_amp.lowering.linalg.float8 import FORMATS, float8_contract, quantized

ROUNDING = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
SMALLEST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
"""The smallest number of a format: steps near zero."""
ROWS, DEPTH, COLUMNS = 32, 48, 16


@jax.jit
def multiply(x, w):
    return float8_contract(x, w, ((1,), (0,)), formats=("e4m3", "e4m3"), platform="cpu")


def exact(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def random(rng, scale: float, *shape: int) -> jax.Array:
    values = rng.standard_normal(shape) * np.exp2(rng.uniform(-6, 0, shape)) * scale
    return jnp.asarray(values, jnp.bfloat16)


def bound(x: np.ndarray, format: str) -> np.ndarray:
    """The error of each element: half a step, of the format's digits or of its smallest numbers."""
    step = SMALLEST[format] * np.abs(x).max() / (float(jnp.finfo(FORMATS[format].dtype).max) / 2)
    return np.maximum(ROUNDING[format] * np.abs(x), step / 2)


@pytest.mark.parametrize("format", FORMATS)
def test_each_element_is_within_the_bound_of_its_format(format) -> None:
    run = jax.jit(functools.partial(quantized, format=format))
    rng = np.random.default_rng(0)
    for scale in 10.0 ** rng.uniform(-6, 6, 40):
        x = random(rng, scale, 16, 16)
        values, exponent = run(x)
        error = np.abs(np.ldexp(exact(values), -int(exponent)) - exact(x))
        assert (error <= bound(exact(x), format)).all(), scale
        assert error.max() > 0  # it does round


def test_products_are_within_the_bound_at_all_scales() -> None:
    rng = np.random.default_rng(1)
    for left, right in 10.0 ** rng.uniform(-6, 6, (40, 2)):
        x, w = random(rng, left, ROWS, DEPTH), random(rng, right, DEPTH, COLUMNS)
        a, b = exact(x), exact(w)
        ea, eb = bound(a, "e4m3"), bound(b, "e4m3")
        allowed = ea @ np.abs(b) + np.abs(a) @ eb + ea @ eb + 1e-6 * (np.abs(a) @ np.abs(b))
        error = np.abs(np.asarray(multiply(x, w), np.float64) - a @ b)
        assert (error <= allowed).all()
        assert error.max() > 0.01 * allowed.max()


@pytest.mark.parametrize("format", FORMATS)
def test_the_scale_fills_the_range_and_never_leaves_it(format) -> None:
    largest = float(jnp.finfo(FORMATS[format].dtype).max)
    run = jax.jit(lambda x: quantized(x, format))
    numbers = [2.0**-133, 2.0**-126, 1e-30, 1.0, 0.875, 0.87890625, 1.75, 1.7578125, 3.0, 1e30, 3.3e38]
    for number in numbers:
        values, exponent = run(jnp.asarray([number, -number / 2, 0], jnp.bfloat16))
        found = np.abs(np.asarray(values.astype(jnp.float32)))
        assert np.isfinite(found).all()
        if number > 1e-30:
            assert largest / 2 <= found.max() <= largest
        assert abs(int(exponent)) <= 126


def test_zeros_and_empty_operands() -> None:
    zero = jnp.zeros((16, 16), jnp.bfloat16)
    one = jnp.ones((16, 16), jnp.bfloat16)
    values, exponent = quantized(zero, "e4m3")
    assert int(exponent) == 0
    assert not np.asarray(values.astype(jnp.float32)).any()
    assert not np.asarray(multiply(zero, one)).any()
    for rows, depth, columns in ((0, 16, 16), (16, 0, 16), (16, 16, 0)):
        found = multiply(jnp.ones((rows, depth), jnp.bfloat16), jnp.ones((depth, columns), jnp.bfloat16))
        assert found.shape == (rows, columns)
        assert not np.asarray(found).any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_what_is_not_finite_stays_so_and_harms_nothing_else(bad, formats) -> None:
    rng = np.random.default_rng(2)
    run = jax.jit(lambda x, w: float8_contract(x, w, ((1,), (0,)), formats=formats, platform="cpu"))
    x, w = random(rng, 1.0, ROWS, DEPTH), random(rng, 1.0, DEPTH, COLUMNS)
    plain = np.asarray(run(x, w))
    left = np.asarray(run(x.at[3, 5].set(bad), w))
    assert not np.isfinite(left[3]).any()
    np.testing.assert_allclose(np.delete(left, 3, 0), np.delete(plain, 3, 0), rtol=1e-6)
    right = np.asarray(run(x, w.at[5, 2].set(bad)))
    assert not np.isfinite(right[:, 2]).any()
    np.testing.assert_allclose(np.delete(right, 2, 1), np.delete(plain, 2, 1), rtol=1e-6)


def test_a_deferred_transpose_and_a_batch() -> None:
    rng = np.random.default_rng(3)
    x, w = random(rng, 1.0, ROWS, DEPTH), random(rng, 1.0, COLUMNS, DEPTH)
    both = {"formats": ("e4m3", "e4m3"), "platform": "cpu"}
    deferred = float8_contract(x, Permuted(w, (1, 0)), ((1,), (0,)), **both)
    np.testing.assert_array_equal(deferred, multiply(x, w.T))
    batch = float8_contract(x[None], w.T[None], ((2,), (1,)), ((0,), (0,)), **both)
    np.testing.assert_array_equal(batch[0], deferred)


@pytest.mark.parametrize("target", ["h100", "h200"])
def test_gpus_get_a_product_of_8_bit_operands(target) -> None:
    if not targets.available(target):
        pytest.skip(f"the compiler for {target} is not installed")

    def layer(x, w, g):
        y = float8_contract(x, w, ((1,), (0,)), formats=("e4m3", "e4m3"), platform="gpu")
        return y, float8_contract(g, w, ((1,), (1,)), formats=("e5m2", "e4m3"), platform="gpu")

    with targets.Compilers() as compilers:
        for rows, calls in ((40, 2), (1, 0)):  # rows need be no multiple of 16; XLA refuses a vector in 8 bits
            shapes = ((rows, 64), (64, 32), (rows, 32))
            module = targets.lower(layer, *(jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in shapes), target=target)
            hlo = compilers.compile(module, target).hlo
            assert len(re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8"', hlo)) == calls
