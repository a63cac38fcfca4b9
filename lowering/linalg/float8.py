"""Products of operands that are scaled and rounded to 8-bit floats.

An operand is multiplied by a power of two that brings its largest finite magnitude just below the largest number of the
format, rounded, and multiplied by the inverse in its own dtype.  XLA's compiler for GPUs takes conversion, inverse
scale and product together as one product of 8-bit operands (``__cublas$lt$matmul$f8``); on other platforms the product
has the same values at the speed of the 16-bit one.

A power of two rounds nothing, also in bfloat16, so the only error is that of the format: a relative 2^-4
(``float8_e4m3fn``) or 2^-3 (``float8_e5m2``), and below 2^-14 or 2^-29 of the largest magnitude an absolute one.
Scales come from the operand itself (no history), so nothing saturates.  An infinity or NaN becomes NaN or infinity, and
does not change the scale: a result is not finite exactly where it would not be in the operands' dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.linalg.contraction import Axes, Operand, contract
from xla_amp.lowering.operand import Permuted, as_dtype
from xla_amp.lowering.registry import register

Format: TypeAlias = Literal["e4m3", "e5m2"]


class _Range(NamedTuple):
    dtype: jnp.dtype
    exponent: int
    """The largest number is ``0.875 * 2 ** exponent``."""


FORMATS: Final[Mapping[Format, _Range]] = MappingProxyType(
    {
        "e4m3": _Range(jnp.dtype(jnp.float8_e4m3fn), 9),
        "e5m2": _Range(jnp.dtype(jnp.float8_e5m2), 16),
    }
)
"""Format -> its dtype and range: e4m3 has more digits, for values; e5m2 more range, for gradients."""

_LARGEST_SHIFT: Final = 126
"""Scales are normal numbers of float32 and bfloat16, with normal inverses."""


def shift(x: jax.Array, format: Format) -> jax.Array:
    """The exponent of the power of two that scales `x`: int32, a scalar.

    It is the largest that keeps every finite element in the range of `format`; 0 if there is none but zeros.
    """
    finite = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.zeros((), x.dtype))
    largest = jnp.max(finite, initial=0).astype(jnp.float32)
    mantissa, exponent = jnp.frexp(largest)
    fitting = FORMATS[format].exponent - exponent - (mantissa > 0.875).astype(exponent.dtype)
    return jnp.where(largest > 0, jnp.clip(fitting, -_LARGEST_SHIFT, _LARGEST_SHIFT), 0)


def _power(exponent: jax.Array) -> jax.Array:
    """``2 ** exponent`` in float32, exact, for the exponents of normal numbers."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def quantized(x: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """(`x` scaled and rounded to `format`, the float32 scalar that undoes the scale)."""
    exponent = shift(x, format)
    scaled = x.astype(jnp.float32) * _power(exponent)
    return lax.convert_element_type(scaled, FORMATS[format].dtype), _power(-exponent)


def rounded(x: jax.Array, format: Format, *, platform: str) -> jax.Array:
    """`x` in its own dtype, bfloat16 or float32, with the values that `format` holds of it."""
    values, inverse = quantized(x, format)
    if platform == "cpu":  # XLA:CPU drops a pair of conversions, and with it the rounding
        values = lax.optimization_barrier(values)
    return values.astype(x.dtype) * inverse.astype(x.dtype)


def float8_contract(
    left: Operand,
    right: Operand,
    contracting: tuple[Axes, Axes],
    batch: tuple[Axes, Axes] = ((), ()),
    *,
    formats: tuple[Format, Format],
    platform: str,
) -> jax.Array:
    """`xla_amp.lowering.linalg.contraction.contract` of operands that are rounded to 8-bit floats first.

    Args:
        left, right: bfloat16 operands, otherwise as `contract` takes them.
        contracting, batch: as `contract` takes them.
        formats: of the left and of the right operand.
        platform: "cpu", "gpu" or "tpu".

    Returns:
        As `contract`: bfloat16, on CPU the float32 accumulator.
    """
    operands: list[Operand] = []
    for operand, format in zip((left, right), formats, strict=True):
        if isinstance(operand, Permuted):
            operands.append(Permuted(rounded(operand.base, format, platform=platform), operand.permutation))
        else:
            operands.append(rounded(operand, format, platform=platform))
    return contract(operands[0], operands[1], contracting, batch, platform=platform)


@register("xla_amp::float8_mm", takes=(Permuted,))
def float8_mm(left: Operand, right: Operand, left_format: Format, right_format: Format, *, platform: str) -> jax.Array:
    product = float8_contract(left, right, ((1,), (0,)), formats=(left_format, right_format), platform=platform)
    return as_dtype(product, left.dtype)
