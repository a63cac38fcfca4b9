"""Products of operands that are scaled and rounded to 8-bit floats.

Each operand is multiplied by a power of two that brings its largest finite magnitude just below the largest number of
the format, and rounded.

=========  ================================================================================================
platform   form
=========  ================================================================================================
gpu        ``dot_general`` of 8-bit operands with the algorithm ``ANY_F8_ANY_F8_F32``, which XLA makes a call
           of cuBLASLt (``__cublas$lt$matmul$f8``) whatever its options are, then the inverse scales; a GPU
           without 8-bit products refuses it
others     the product of the same values in the operands' dtype, at its speed
=========  ================================================================================================

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

from xla_amp.lowering.linalg.contraction import Axes, Operand, base, contract
from xla_amp.lowering.operand import Permuted, as_dtype
from xla_amp.lowering.registry import register

Float8Format: TypeAlias = Literal["e4m3", "e5m2"]


class _Range(NamedTuple):
    dtype: jnp.dtype
    exponent: int
    """The largest number is ``0.875 * 2 ** exponent``."""


FORMATS: Final[Mapping[Float8Format, _Range]] = MappingProxyType(
    {
        "e4m3": _Range(jnp.dtype(jnp.float8_e4m3fn), 9),
        "e5m2": _Range(jnp.dtype(jnp.float8_e5m2), 16),
    }
)
"""Format -> its dtype and range: e4m3 has more digits, for values; e5m2 more range, for gradients."""

_EIGHT_BIT_PRODUCT: Final = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32

_LARGEST_SHIFT: Final = 126
"""Scales are normal numbers of float32 and bfloat16, with normal inverses."""


def shift(x: jax.Array, format: Float8Format) -> jax.Array:
    """The exponent of the power of two that scales `x`: int32 ().

    It is the largest that keeps every finite element in the range of `format`; 0 if there is none but zeros.
    """
    finite = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.zeros((), x.dtype))
    largest = jnp.max(finite, initial=0).astype(jnp.float32)
    # The exponent and mantissa that `jnp.frexp` gives, without its multiplication, which overflows beside a select.
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent, above = (bits >> 23) - 126, (bits & 0x7FFFFF) > 0x600000  # a mantissa above 0.875
    fitting = FORMATS[format].exponent - exponent - above.astype(jnp.int32)
    return jnp.where(largest > 0, jnp.clip(fitting, -_LARGEST_SHIFT, _LARGEST_SHIFT), 0)


def _power(exponent: jax.Array) -> jax.Array:
    """``2 ** exponent`` in float32, exact, for the exponents of normal numbers."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def quantized(x: jax.Array, format: Float8Format) -> tuple[jax.Array, jax.Array]:
    """(`x` scaled and rounded to `format`, the exponent of its scale as `shift` gives it)."""
    exponent = shift(x, format)
    return lax.convert_element_type(x.astype(jnp.float32) * _power(exponent), FORMATS[format].dtype), exponent


def _times_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x * 2 ** exponent`` in the dtype of `x`, for sums of two exponents that `shift` gives.

    It is two factors, since one may be no number of float32; what lies between is between `x` and the result.
    """
    half = exponent // 2
    return (x.astype(jnp.float32) * _power(half) * _power(exponent - half)).astype(x.dtype)


def float8_contract(
    left: Operand,
    right: Operand,
    contracting: tuple[Axes, Axes],
    batch: tuple[Axes, Axes] = ((), ()),
    *,
    formats: tuple[Float8Format, Float8Format],
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
    x = base(left, contracting[0], batch[0])
    w = base(right, contracting[1], batch[1])
    (a, left_shift), (b, right_shift) = (
        quantized(value, format) for (value, *_), format in zip((x, w), formats, strict=True)
    )
    summed, lead = (x[1], w[1]), (x[2], w[2])
    if platform == "gpu" and _rows(*x) > 1 and _rows(*w) > 1:  # XLA refuses a product with a vector in 8 bits
        product = lax.dot_general(
            a, b, (summed, lead), precision=_EIGHT_BIT_PRODUCT, preferred_element_type=jnp.bfloat16
        )
    else:
        a, b = (_kept_apart(each, platform).astype(x[0].dtype) for each in (a, b))
        product = contract(a, b, summed, lead, platform=platform)
    return _times_power(product, -(left_shift + right_shift))


def _rows(value: jax.Array, contracted: Axes, batch: Axes) -> int:
    """The largest axis that the result has of one operand alone."""
    return max((size for axis, size in enumerate(value.shape) if axis not in (*contracted, *batch)), default=1)


def _kept_apart(values: jax.Array, platform: str) -> jax.Array:
    """8-bit values with their rounding, which XLA:CPU drops with a pair of conversions; on a GPU it costs nothing."""
    return lax.optimization_barrier(values) if platform == "cpu" else values


@register("xla_amp::float8_mm", takes=(Permuted,))
def float8_mm(
    left: Operand, right: Operand, left_format: Float8Format, right_format: Float8Format, *, platform: str
) -> jax.Array:
    formats = (left_format, right_format)
    product = float8_contract(left, right, ((1,), (0,)), formats=formats, platform=platform)
    return as_dtype(product, left.dtype)
