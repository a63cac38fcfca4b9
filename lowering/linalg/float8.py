"""Products of operands that are scaled and rounded to 8-bit floats.

Elements are multiplied by powers of two that bring the largest finite magnitude among those that share a scale just
below the largest number of the format, and rounded.  Those are all elements of an operand (``tensor``), those that one
element of the result reads of it (``row``), or 32 that are summed in turn (``block``: MXFP8).

=========  ==========  =====================================================================================
platform   scaling     form
=========  ==========  =====================================================================================
gpu        tensor,     ``dot_general`` of 8-bit operands with the algorithm ``ANY_F8_ANY_F8_F32``, which XLA
           row         makes a call of cuBLASLt (``__cublas$lt$matmul$f8``) whatever its options are, then the
                       inverse scales; a GPU without 8-bit products refuses it
gpu        block       the call that `jax.nn.scaled_matmul` is, of which XLA makes cuDNN's
                       ``__cudnn$blockScaledDot`` on a GPU that scales blocks; it expands it for others
others     all         the product of the same values in the operands' dtype, at its speed.  "any" is the form for
                       programs whose platform is not known: XLA:GPU makes 8-bit calls of it with the options of
                       ``policy/tables/float8.toml``
=========  ==========  =====================================================================================

A power of two rounds nothing, also in bfloat16, so the only error is that of the format: a relative 2^-4
(``float8_e4m3fn``) or 2^-3 (``float8_e5m2``), and below 2^-14 or 2^-29 of the largest magnitude an absolute one.
Scales come from the operand itself (no history), so nothing saturates.  An infinity or NaN becomes NaN or infinity, and
does not change the scale: a result is not finite exactly where it would not be in the operands' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.linalg.contraction import Axes, Operand, base, contract
from xla_amp.lowering.operand import Permuted, as_dtype
from xla_amp.lowering.registry import register

Format: TypeAlias = Literal["e4m3", "e5m2"]
Scaling: TypeAlias = Literal["tensor", "row", "block"]
BLOCK: Final = 32
"""Elements that share a scale in the Open Compute Project's MX formats."""


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

_EIGHT_BIT_PRODUCT: Final = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32

BLOCK_PRODUCT: Final = "__op$block_scaled_dot"
"""XLA's name of (batch, rows, depth) times (batch, columns, depth), with their scales as further operands."""
_BLOCK_PRODUCT_CONFIG: Final = (
    '{"scaled_dot_backend_config": '
    '{"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0], "dequantize_type": "BF16"}}'
)

_LARGEST_SHIFT: Final = 126
"""Scales are normal numbers of float32 and bfloat16, with normal inverses."""


def shift(x: jax.Array, format: Format, axes: Axes | None = None) -> jax.Array:
    """The exponents of the powers of two that scale `x`: int32.

    Each is the largest that keeps every finite element in the range of `format`; 0 if there is none but zeros.

    Args:
        x: the operand.
        format: of the scaled elements.
        axes: along which elements share a scale, and which the result lacks; None for all.
    """
    finite = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.zeros((), x.dtype))
    largest = jnp.max(finite, axis=axes, initial=0).astype(jnp.float32)
    # The exponent and mantissa that `jnp.frexp` gives, without its multiplication, which overflows beside a select.
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent, above = (bits >> 23) - 126, (bits & 0x7FFFFF) > 0x600000  # a mantissa above 0.875
    fitting = FORMATS[format].exponent - exponent - above.astype(jnp.int32)
    return jnp.where(largest > 0, jnp.clip(fitting, -_LARGEST_SHIFT, _LARGEST_SHIFT), 0)


def _power(exponent: jax.Array) -> jax.Array:
    """``2 ** exponent`` in float32, exact, for the exponents of normal numbers."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def _in_range(x: jax.Array, format: Format, axes: Axes | None) -> tuple[jax.Array, jax.Array]:
    """(`x` times its scales in float32, the exponents of these as `shift` gives them)."""
    exponents = shift(x, format, axes)
    return x.astype(jnp.float32) * _power(exponents if axes is None else jnp.expand_dims(exponents, axes)), exponents


def quantized(x: jax.Array, format: Format, axes: Axes | None = None) -> tuple[jax.Array, jax.Array]:
    """(`x` scaled and rounded to `format`, the exponents of its scales as `shift` gives them)."""
    values, exponents = _in_range(x, format, axes)
    return lax.convert_element_type(values, FORMATS[format].dtype), exponents


def rounded(x: jax.Array, format: Format) -> jax.Array:
    """`x` in its own dtype, bfloat16 or float32, with the values that `format` holds of it.

    It is for programs that must run on any platform: XLA:GPU makes 8-bit products of such operands with the options of
    ``policy/tables/float8.toml`` only.
    """
    values, exponent = quantized(x, format)
    return _kept_apart(values, "any").astype(x.dtype) * _power(-exponent).astype(x.dtype)


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
    formats: tuple[Format, Format],
    scaling: Scaling = "tensor",
    platform: str,
) -> jax.Array:
    """`xla_amp.lowering.linalg.contraction.contract` of operands that are rounded to 8-bit floats first.

    Args:
        left, right: bfloat16 operands, otherwise as `contract` takes them.
        contracting, batch: as `contract` takes them.
        formats: of the left and of the right operand.
        scaling: which elements share a scale.
        platform: "cpu", "gpu", "tpu" or "any".

    Returns:
        As `contract`: bfloat16, on CPU the float32 accumulator.

    Raises:
        ValueError: `scaling` is "block", and the summed size is no multiple of 32.
    """
    x = _Factor(*base(left, contracting[0], batch[0]))
    w = _Factor(*base(right, contracting[1], batch[1]))
    if scaling == "block":
        return _block_product(x, w, formats, platform)
    (a, left_shift), (b, right_shift) = (
        quantized(each.value, format, each.contracted if scaling == "row" else None)
        for each, format in zip((x, w), formats, strict=True)
    )
    summed, lead = (x.contracted, w.contracted), (x.batch, w.batch)
    if platform == "gpu" and max(x.rows) > 1 and max(w.rows) > 1:  # XLA refuses a product with a vector in 8 bits
        product = lax.dot_general(
            a, b, (summed, lead), precision=_EIGHT_BIT_PRODUCT, preferred_element_type=jnp.bfloat16
        )
    else:
        a, b = (_kept_apart(each, platform).astype(x.value.dtype) for each in (a, b))
        product = contract(a, b, summed, lead, platform=platform)
    if scaling == "tensor":
        return _times_power(product, -(left_shift + right_shift))
    outer = x.of_rows(left_shift)[:, :, None] + w.of_rows(right_shift)[:, None, :]
    return _times_power(product, -outer.reshape(product.shape))


class _Factor(NamedTuple):
    """An operand of a product."""

    value: jax.Array
    contracted: Axes
    batch: Axes

    @property
    def free(self) -> Axes:
        """Axes that the result has of this operand alone."""
        return tuple(each for each in range(self.value.ndim) if each not in (*self.contracted, *self.batch))

    @property
    def rows(self) -> tuple[int, ...]:
        """Their sizes."""
        return self.sizes(self.free) or (1,)

    def sizes(self, axes: Axes) -> tuple[int, ...]:
        """Of some axes."""
        return tuple(self.value.shape[axis] for axis in axes)

    def of_rows(self, exponents: jax.Array) -> jax.Array:
        """A value for each row of the operand as an array of (batch, rows)."""
        kept = sorted((*self.batch, *self.free))
        moved = lax.transpose(exponents, [kept.index(axis) for axis in (*self.batch, *self.free)])
        return moved.reshape(math.prod(self.sizes(self.batch)), math.prod(self.rows))

    def blocks(self) -> jax.Array:
        """The operand as (batch, rows, blocks, 32)."""
        batch, rows, depth = (math.prod(self.sizes(axes)) for axes in (self.batch, self.free, self.contracted))
        if depth % BLOCK:
            raise ValueError(f"a product in blocks of {BLOCK} sums over {depth} elements, which is no multiple of it")
        moved = lax.transpose(self.value, (*self.batch, *self.free, *self.contracted))
        return moved.reshape(batch, rows, depth // BLOCK, BLOCK)


def _block_product(x: _Factor, w: _Factor, formats: tuple[Format, Format], platform: str) -> jax.Array:
    shape = (*x.sizes(x.batch), *x.sizes(x.free), *w.sizes(w.free))
    found = [quantized(each.blocks(), format, (3,)) for each, format in zip((x, w), formats, strict=True)]
    if platform == "gpu":
        values = [value.reshape(*value.shape[:2], value.shape[2] * BLOCK) for value, _ in found]
        scales = [
            lax.bitcast_convert_type((127 - exponents).astype(jnp.uint8), jnp.float8_e8m0fnu) for _, exponents in found
        ]
        # `jax.nn.scaled_matmul` is the same call with a rule for partitions, which asks for devices: JAX has none yet
        # where this function is the lowering of another primitive.
        result = jax.ShapeDtypeStruct((*values[0].shape[:2], values[1].shape[1]), jnp.bfloat16)
        call = jax.ffi.ffi_call(
            BLOCK_PRODUCT, result, custom_call_api_version=1, legacy_backend_config=_BLOCK_PRODUCT_CONFIG
        )
        product: jax.Array = call(values[0], values[1], scales[0], scales[1])
        return product.reshape(shape)
    return _of_blocks(found, x.value.dtype, platform).reshape(shape)


def _of_blocks(factors: Sequence[tuple[jax.Array, jax.Array]], dtype: Any, platform: str) -> jax.Array:
    """The product of 8-bit values, (batch, rows, blocks, 32), with the exponents of their scales, as one in `dtype`."""
    a, b = (
        (_kept_apart(value, platform).astype(jnp.float32) * _power(-exponents)[..., None])
        .astype(dtype)
        .reshape(*value.shape[:2], value.shape[2] * BLOCK)
        for value, exponents in factors
    )
    return contract(a, b, ((2,), (2,)), ((0,), (0,)), platform=platform)


def expanded_block_product(
    left: jax.Array, right: jax.Array, left_scales: jax.Array, right_scales: jax.Array
) -> jax.Array:
    """What the call `BLOCK_PRODUCT` computes, for platforms that do not have it.

    Args:
        left: 8-bit floats of (batch, rows, depth).
        right: of (batch, columns, depth).
        left_scales: ``float8_e8m0fnu`` of (batch, rows, depth / 32).
        right_scales: the same for the columns.

    Returns:
        (batch, rows, columns) in bfloat16.
    """
    factors = [
        (
            values.reshape(*scales.shape, values.shape[2] // scales.shape[2]),
            127 - lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32),
        )
        for values, scales in ((left, left_scales), (right, right_scales))
    ]
    return _of_blocks(factors, jnp.bfloat16, "any")


def _kept_apart(values: jax.Array, platform: str) -> jax.Array:
    """8-bit values with their rounding, which XLA:CPU drops with a pair of conversions; on a GPU it costs nothing."""
    return lax.optimization_barrier(values) if platform in ("cpu", "any") else values


@register("xla_amp::float8_mm", takes=(Permuted,))
def float8_mm(
    left: Operand, right: Operand, left_format: Format, right_format: Format, scaling: Scaling, *, platform: str
) -> jax.Array:
    formats = (left_format, right_format)
    product = float8_contract(left, right, ((1,), (0,)), formats=formats, scaling=scaling, platform=platform)
    return as_dtype(product, left.dtype)
