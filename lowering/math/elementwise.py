"""Elementwise operations of one tensor, and of three: selection, interpolation, fused multiply-add, quantization.

Each table row is an ATen name and the function that computes it.  The tables differ in the dtype of the computation:

============  ==========================================================================  =======================
table         computed in                                                                 examples
============  ==========================================================================  =======================
`FLOAT`       the result's dtype, halves in float32; integers become floats first         exp, sqrt, sigmoid
`SAME`        the operand's dtype, halves in float32                                      neg, abs, sign
`ROUNDING`    as `SAME`; integers are returned as they are                                floor, round
`PREDICATES`  the operand's dtype; the result is boolean                                  isnan, logical_not
============  ==========================================================================  =======================

Operations of two tensors are in `arithmetic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from xla_amp.lowering.math import arithmetic  # noqa: F401  (registers its lowerings)
from xla_amp.lowering.operand import as_dtype, opmath, up, written
from xla_amp.lowering.registry import register

Unary = Callable[[jax.Array], jax.Array]


def is_integral(dtype: Any) -> bool:
    """Whether `dtype` is an integer or boolean type."""
    return np.dtype(dtype).kind in "iub"


def _erfcx(x: jax.Array) -> jax.Array:
    """exp(x^2) erfc(x).  JAX 0.10 wrongly returns 0 around x = 26.6."""
    far = 10.0  # from here on twelve terms of the asymptotic series (DLMF 7.12.1) are exact to float64
    large = jnp.where(x > far, x, far)
    terms = np.cumprod([1.0, *(-(2 * n - 1) / 2 for n in range(1, 13))])
    series = jnp.polyval(terms[::-1].astype(x.dtype), 1 / (large * large)) / (large * np.asarray(np.pi**0.5, x.dtype))
    return jnp.where(x > far, series, special.erfcx(jnp.minimum(x, far)))


def _digamma(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, jnp.copysign(np.asarray(np.inf, x.dtype), -x), special.digamma(x))


def _sign(x: jax.Array) -> jax.Array:
    if x.dtype.kind == "c":
        return jnp.sign(x)
    zero = jnp.zeros((), x.dtype)
    return as_dtype(x > zero, x.dtype) - as_dtype(x < zero, x.dtype) if x.dtype != jnp.bool_ else x  # NaN has sign 0


FLOAT: dict[str, Unary] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "digamma": _digamma,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "i0": special.i0,
    "lgamma": lax.lgamma,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "special_erfcx": _erfcx,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "special_modified_bessel_i0": special.i0,
    "special_modified_bessel_i1": special.i1,
    "special_ndtri": special.ndtri,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}

SAME: dict[str, Unary] = {
    "_conj_physical": jnp.conj,
    "abs": jnp.abs,
    "bitwise_not": jnp.bitwise_not,
    "neg": jnp.negative,
    "sgn": _sign,
    "sign": _sign,
}

ROUNDING: dict[str, Unary] = {
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "frac": lambda x: x - jnp.trunc(x),
    "round": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "trunc": jnp.trunc,
}

PREDICATES: dict[str, Unary] = {
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "logical_not": jnp.logical_not,
    "signbit": jnp.signbit,
}


def _in_float(function: Unary) -> Callable[..., jax.Array]:
    def lowering(x: jax.Array, *, out: Any) -> jax.Array:
        return function(as_dtype(x, opmath(out.dtype)))

    return lowering


def _in_same(function: Unary) -> Callable[..., jax.Array]:
    return lambda x: function(up(x))


def _unless_integral(function: Unary) -> Callable[..., jax.Array]:
    return lambda x: x if is_integral(x.dtype) else function(up(x))


def _as_given(function: Unary) -> Callable[..., jax.Array]:
    return lambda x: function(x)


for _table, _wrap in ((FLOAT, _in_float), (SAME, _in_same), (ROUNDING, _unless_integral), (PREDICATES, _as_given)):
    for _name, _function in _table.items():
        register(_name)(_wrap(_function))


# -- one tensor and constants -----------------------------------------------------------------------------------------


@register("relu")
def relu(x: jax.Array, *, platform: str) -> jax.Array:
    """max(x, 0), written to memory: the next product, the gradient's mask and a residual block's sum all read it."""
    return written(jnp.maximum(x, jnp.zeros((), x.dtype)), x.dtype, platform)


@register("round.decimals")
def round_decimals(x: jax.Array, *, decimals: int) -> jax.Array:
    """Half-to-even rounding after scaling by a power of ten, as in torch (which differs from decimal rounding)."""
    if is_integral(x.dtype):
        return x
    x = up(x)
    scale = np.asarray(10.0 ** abs(decimals), x.dtype)
    nearest = ROUNDING["round"]
    return nearest(x * scale) / scale if decimals >= 0 else nearest(x / scale) * scale


@register("angle")
def angle(x: jax.Array, *, out: Any) -> jax.Array:
    """The argument of a complex number; for reals 0 or pi, and NaN for NaN."""
    if x.dtype.kind == "c":
        return jnp.angle(x)
    x = as_dtype(x, opmath(out.dtype))
    pi = jnp.where(x < 0, np.asarray(np.pi, x.dtype), np.asarray(0, x.dtype))
    return jnp.where(jnp.isnan(x), x, pi)


def _hurwitz_zeta(s: int, q: jax.Array) -> jax.Array:
    """The sum of ``(q + k) ** -s`` over k >= 0; JAX has it for q > 0, and below 0 each step adds one term."""

    def is_below(q: jax.Array) -> jax.Array:
        return (q < 0) & (q > -1e4)

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, total = state
        below = is_below(q)
        return jnp.where(below, q + 1, q), total + jnp.where(below, lax.integer_pow(q, -s), 0)

    q, total = lax.while_loop(lambda state: jnp.any(is_below(state[0])), step, (q, jnp.zeros_like(q)))
    total += jnp.where(q == 0, jnp.inf, special.zeta(jnp.asarray(s, q.dtype), jnp.where(q == 0, 1, q)))
    far = lax.integer_pow(1 / q, s - 1) * (1 / (s - 1) + 0.5 / q)  # JAX's has no limit for large numbers
    return jnp.where(q > 1e9, far, jnp.where(jnp.isneginf(q), jnp.nan, total))


@register("polygamma")
def polygamma(n: int, x: jax.Array, *, out: Any) -> jax.Array:
    """The n-th derivative of digamma."""
    x = as_dtype(x, opmath(out.dtype))
    if n == 0:
        return special.digamma(x)
    return (1 if n % 2 else -1) * math.factorial(n) * _hurwitz_zeta(n + 1, x)


# -- clamping: NaN in any operand gives NaN; a lower bound above the upper one gives the upper ------------------------


@register("clamp", "clamp.Tensor")
def clamp(x: jax.Array, min: Any = None, max: Any = None, *, common: Any) -> jax.Array:  # schema names
    """min(max(x, min), max); either bound may be absent."""
    x = as_dtype(x, common)
    if min is not None:
        x = jnp.maximum(x, as_dtype(min, common))
    return x if max is None else jnp.minimum(x, as_dtype(max, common))


@register("clamp_min", "clamp_min.Tensor")
def clamp_min(x: jax.Array, min: Any, *, common: Any) -> jax.Array:
    """max(x, min)."""
    return jnp.maximum(as_dtype(x, common), as_dtype(min, common))


@register("clamp_max", "clamp_max.Tensor")
def clamp_max(x: jax.Array, max: Any, *, common: Any) -> jax.Array:
    """min(x, max)."""
    return jnp.minimum(as_dtype(x, common), as_dtype(max, common))


# -- three tensors ----------------------------------------------------------------------------------------------------


@register("where.self")
def where(condition: jax.Array, x: jax.Array, other: jax.Array, *, out: Any) -> jax.Array:
    """`x` where `condition`, otherwise `other`."""
    return jnp.where(condition, as_dtype(x, out.dtype), as_dtype(other, out.dtype))


@register("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: jax.Array, mask: jax.Array, value: Any) -> jax.Array:
    """`value` where `mask`, otherwise `x`; the dtype of `x`."""
    return jnp.where(mask, as_dtype(value, x.dtype), x)


@register("addcmul")
def addcmul(x: jax.Array, first: jax.Array, second: jax.Array, *, value: Any = 1, common: Any) -> jax.Array:
    """x + value * first * second."""
    dtype = opmath(common)
    return as_dtype(x, dtype) + as_dtype(value, dtype) * as_dtype(first, dtype) * as_dtype(second, dtype)


@register("addcdiv")
def addcdiv(x: jax.Array, first: jax.Array, second: jax.Array, *, value: Any = 1, common: Any) -> jax.Array:
    """x + value * (first / second); torch admits floats only."""
    dtype = opmath(common)
    return as_dtype(x, dtype) + as_dtype(value, dtype) * (as_dtype(first, dtype) / as_dtype(second, dtype))


@register("lerp.Scalar", "lerp.Tensor")
def lerp(start: jax.Array, end: jax.Array, weight: Any, *, common: Any) -> jax.Array:
    """start + weight * (end - start), from whichever end is nearer, so that weight 1 gives `end` exactly.

    Source: ``at::native::lerp`` (ATen/native/Lerp.h).
    """
    dtype = opmath(common)
    start, end, weight = as_dtype(start, dtype), as_dtype(end, dtype), as_dtype(weight, dtype)
    difference = end - start
    near_start = start + weight * difference
    return jnp.where(jnp.abs(weight) < 0.5, near_start, end - difference * (1 - weight))
