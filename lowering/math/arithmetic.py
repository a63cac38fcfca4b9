"""Elementwise operations of two tensors, or of a tensor and a number, bits included.

torch first converts both operands to one dtype (*common*), then computes, half dtypes in float32.  The tables differ in
how operands are converted:

===============  ===================================================================================================
table            operands
===============  ===================================================================================================
`LINEAR`         tensors in common; a number keeps its float32 value beside a half tensor
`ARITHMETIC`     in common: a number is rounded to bfloat16 beside a bfloat16 tensor
`FLOAT`          as `ARITHMETIC`, but integers in the default float dtype
`COMPARISONS`    as `ARITHMETIC`
`LOGICAL`        truth values
`BITWISE`        in common, which is an integer or boolean type
===============  ===================================================================================================

In torch's CPU kernels (BinaryOpsKernel.cpp) only sums, products and quotients take ``opmath_t`` scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from xla_amp.lowering.operand import as_dtype, axes, is_half, opmath, rounded_to_half, up
from xla_amp.lowering.registry import register

Binary = Callable[[Any, Any], jax.Array]


def _is_float(x: jax.Array) -> bool:
    return x.dtype.kind not in "iub"


def _is(value: Any, number: float) -> bool:
    """Whether `value` is the Python number `number`; False for a lifted number, whose value is not known."""
    return isinstance(value, (bool, int, float)) and value == number


# -- the functions; both operands are of one dtype --------------------------------------------------------------------


def _truncated_remainder(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.rem(*jnp.broadcast_arrays(x, y))


def _floored_division(x: jax.Array, y: jax.Array) -> jax.Array:
    """Python's ``//``; for floats from the remainder, so that rounding never lifts the quotient past an integer.

    Source: ``c10::div_floor_floating`` (c10/util/generic_math.h).
    """
    if not _is_float(x):
        return jnp.floor_divide(x, y)
    remainder = _truncated_remainder(x, y)
    quotient = (x - remainder) / y
    quotient = jnp.where((remainder != 0) & ((y < 0) != (remainder < 0)), quotient - 1, quotient)
    floor = jnp.floor(quotient)
    floor = jnp.where(quotient - floor > 0.5, floor + 1, floor)
    floor = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(floor), x / y), floor)
    return jnp.where(y == 0, x / y, floor)


def _integer_power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """base ** exponent of integers, modulo the size of their type; `jnp.power` reads only six bits of the exponent."""

    def multiply(_: Any, carried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        result, square, left = carried
        return jnp.where((left & 1) == 1, result * square, result), square * square, left >> 1

    bits = jnp.iinfo(exponent.dtype).bits
    result: jax.Array = lax.fori_loop(0, bits, multiply, (jnp.ones_like(base), base, exponent))[0]
    return result


def power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """base ** exponent; of integers with a negative exponent only 1 and -1 are not 0, as in torch."""
    if _is_float(base):
        return jnp.power(base, exponent)
    base, exponent = jnp.broadcast_arrays(base, exponent)
    result = _integer_power(base, jnp.maximum(exponent, jnp.zeros((), exponent.dtype)))
    if base.dtype.kind != "i":
        return result
    odd = jnp.where((exponent & 1) == 1, base, base * base)  # of 1 and -1
    inverse = jnp.where(jnp.abs(base) == 1, odd, jnp.zeros((), base.dtype))
    return jnp.where(exponent < 0, inverse, result)


def _of_infinite_shape(a: jax.Array, x: jax.Array, limit: int, otherwise: jax.Array) -> jax.Array:
    """The limit of an incomplete gamma function for an infinite shape `a`; two infinities give NaN, as in torch."""
    return jnp.where(jnp.isposinf(a), jnp.where(jnp.isposinf(x), jnp.nan, limit), otherwise)


Table = Mapping[tuple[str, ...], Binary]

LINEAR: Table = {
    ("floor_divide", "floor_divide.Scalar"): _floored_division,
    ("mul.Scalar", "mul.Tensor"): lambda x, y: x & y if x.dtype == jnp.bool_ else x * y,
}

ARITHMETIC: Table = {
    ("fmax",): jnp.fmax,
    ("fmin",): jnp.fmin,
    ("fmod.Scalar", "fmod.Tensor"): _truncated_remainder,
    ("gcd",): jnp.gcd,
    ("hypot",): jnp.hypot,
    ("lcm",): jnp.lcm,
    ("maximum",): jnp.maximum,
    ("minimum",): jnp.minimum,
    ("pow.Scalar", "pow.Tensor_Tensor"): power,
    ("remainder.Scalar", "remainder.Scalar_Tensor", "remainder.Tensor"): jnp.remainder,
}

FLOAT: Table = {
    ("atan2",): jnp.arctan2,
    ("copysign.Scalar", "copysign.Tensor"): jnp.copysign,
    ("igamma",): lambda a, x: _of_infinite_shape(a, x, 0, special.gammainc(a, x)),
    ("igammac",): lambda a, x: _of_infinite_shape(a, x, 1, special.gammaincc(a, x)),
    ("special_zeta", "special_zeta.other_scalar", "special_zeta.self_scalar"): special.zeta,
}

COMPARISONS: Table = {
    ("eq.Scalar", "eq.Tensor"): jnp.equal,
    ("ge.Scalar", "ge.Tensor"): jnp.greater_equal,
    ("gt.Scalar", "gt.Tensor"): jnp.greater,
    ("le.Scalar", "le.Tensor"): jnp.less_equal,
    ("lt.Scalar", "lt.Tensor"): jnp.less,
    ("ne.Scalar", "ne.Tensor"): jnp.not_equal,
}

LOGICAL: Table = {
    ("logical_and",): jnp.logical_and,
    ("logical_or",): jnp.logical_or,
    ("logical_xor",): jnp.logical_xor,
}

BITWISE: Table = {
    ("bitwise_and.Scalar", "bitwise_and.Scalar_Tensor", "bitwise_and.Tensor"): jnp.bitwise_and,
    ("bitwise_or.Scalar", "bitwise_or.Scalar_Tensor", "bitwise_or.Tensor"): jnp.bitwise_or,
    ("bitwise_xor.Scalar", "bitwise_xor.Scalar_Tensor", "bitwise_xor.Tensor"): jnp.bitwise_xor,
    (
        "__lshift__.Scalar",
        "__lshift__.Tensor",
        "bitwise_left_shift.Scalar_Tensor",
        "bitwise_left_shift.Tensor",
        "bitwise_left_shift.Tensor_Scalar",
    ): jnp.left_shift,
    (
        "__rshift__.Scalar",
        "__rshift__.Tensor",
        "bitwise_right_shift.Scalar_Tensor",
        "bitwise_right_shift.Tensor",
        "bitwise_right_shift.Tensor_Scalar",
    ): jnp.right_shift,
}


def _rounded(x: Any, common: Any) -> jax.Array:
    """`x` rounded to `common`, in its opmath dtype."""
    wide = as_dtype(x, opmath(common))
    if not is_half(common) or getattr(x, "dtype", None) == common:
        return wide
    return rounded_to_half(wide, common)


def _float_common(common: Any, out: Any) -> np.dtype:
    """`common`, or the result's dtype (torch's default float dtype) where `common` is integral."""
    dtype: np.dtype = np.dtype(out.dtype if np.dtype(common).kind in "iub" else common)
    return dtype


def _in_opmath(function: Binary) -> Callable[..., jax.Array]:
    def lowering(x: Any, y: Any, *, common: Any) -> jax.Array:
        return function(as_dtype(x, opmath(common)), as_dtype(y, opmath(common)))

    return lowering


def _in_common(function: Binary) -> Callable[..., jax.Array]:
    def lowering(x: Any, y: Any, *, common: Any) -> jax.Array:
        return function(_rounded(x, common), _rounded(y, common))

    return lowering


def _in_float(function: Binary) -> Callable[..., jax.Array]:
    def lowering(x: Any, y: Any, *, common: Any, out: Any) -> jax.Array:
        dtype = _float_common(common, out)
        return function(_rounded(x, dtype), _rounded(y, dtype))

    return lowering


def _as_given(function: Binary) -> Callable[..., jax.Array]:
    return lambda x, y: function(x, y)


def _register_all(rows: Iterable[tuple[Table, Callable[[Binary], Callable[..., jax.Array]]]]) -> None:
    for table, wrap in rows:
        for names, function in table.items():
            register(*names)(wrap(function))


_register_all(
    (
        (LINEAR, _in_opmath),
        (ARITHMETIC, _in_common),
        (FLOAT, _in_float),
        (COMPARISONS, _in_common),
        (LOGICAL, _as_given),
        (BITWISE, _in_common),
    )
)


for _direction, _shift in (("left", jnp.left_shift), ("right", jnp.right_shift)):
    _name = f"__i{_direction[0]}shift__"
    register(f"{_name}.Scalar", f"{_name}.Tensor", mutates=("self",))(_in_common(_shift))


@register("_add_relu.Tensor")
def add_relu(x: Any, y: Any, alpha: Any = 1, *, common: Any) -> jax.Array:
    return jnp.maximum(add(x, y, alpha, common=common), 0)


@register("nextafter")
def nextafter(x: jax.Array, y: jax.Array, *, common: Any) -> jax.Array:
    """The next number after `x` towards `y` in the dtype `common`."""
    return jnp.nextafter(as_dtype(x, common), as_dtype(y, common))


# -- sums: `alpha` scales the second operand --------------------------------------------------------------------------


@register("add.Scalar", "add.Tensor")
def add(x: Any, y: Any, alpha: Any = 1, *, common: Any) -> jax.Array:
    """x + alpha * y (logical or, for booleans)."""
    dtype = opmath(common)
    right = as_dtype(y, dtype)
    return as_dtype(x, dtype) + (right if _is(alpha, 1) else right * as_dtype(alpha, dtype))


@register("sub.Scalar", "sub.Tensor")
def sub(x: Any, y: Any, alpha: Any = 1, *, common: Any) -> jax.Array:
    """x - alpha * y."""
    dtype = opmath(common)
    right = as_dtype(y, dtype)
    return as_dtype(x, dtype) - (right if _is(alpha, 1) else right * as_dtype(alpha, dtype))


@register("rsub.Scalar", "rsub.Tensor")
def rsub(x: Any, y: Any, alpha: Any = 1, *, common: Any) -> jax.Array:
    """y - alpha * x."""
    return sub(y, x, alpha, common=common)


# -- division ---------------------------------------------------------------------------------------------------------


@register("div.Scalar", "div.Tensor", "div.Scalar_mode", "div.Tensor_mode")
def divide(x: Any, y: Any, *, rounding_mode: str | None = None, common: Any, out: Any) -> jax.Array:
    """x / y, or the quotient rounded down ("floor") or towards zero ("trunc"); integers then stay integers."""
    dtype = _float_common(common, out) if rounding_mode is None else np.dtype(common)
    left, right = as_dtype(x, opmath(dtype)), as_dtype(y, opmath(dtype))
    if rounding_mode is None:
        return left / right
    if rounding_mode == "floor":
        return _floored_division(left, right)
    if not _is_float(left):
        return lax.div(*jnp.broadcast_arrays(left, right))
    return jnp.trunc(_rounded(left / right, dtype))  # torch rounds the quotient first, so 1.999 is 2 in bfloat16


register("floor_divide_.Tensor", mutates=("self",))(_in_opmath(_floored_division))  # functionally `floor_divide`


# -- powers -----------------------------------------------------------------------------------------------------------

_POWERS: Mapping[float, Callable[[jax.Array], jax.Array]] = {
    -2: lambda x: 1 / (x * x),
    -1: lambda x: 1 / x,
    -0.5: lax.rsqrt,
    0.5: jnp.sqrt,
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
}
"""Exponents that torch's kernel treats separately too (PowKernel.cpp)."""
_LARGEST_PRODUCT_EXPONENT = 16
"""Integer exponents up to this are products; above it, the error of a product exceeds that of exp(log)."""


@register("pow.Tensor_Scalar", static=("exponent",), dynamic=("exponent",))
def power_of_number(x: jax.Array, exponent: Any, *, common: Any) -> jax.Array:
    """x ** exponent for a number."""
    x = as_dtype(x, opmath(common))
    if isinstance(exponent, (bool, int, float)):
        if exponent in _POWERS and (_is_float(x) or exponent > 0):
            return _POWERS[exponent](x)
        product = exponent >= 0 and float(exponent).is_integer()
        if product and (exponent <= _LARGEST_PRODUCT_EXPONENT or not _is_float(x)):
            return lax.integer_pow(x, int(exponent))
    return power(x, as_dtype(exponent, x.dtype))


register("pow_.Scalar", mutates=("self",), static=("exponent",), dynamic=("exponent",))(
    power_of_number
)  # functionally `pow.Tensor_Scalar`
register("pow_.Tensor", mutates=("self",))(_in_common(power))  # functionally `pow.Tensor_Tensor`


# ---- bits ------------------------------------------------------------------------------------------------------------


@register("frexp.Tensor")
def frexp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mantissa with magnitude in [0.5, 1), exponent); 0, infinities and NaN are returned as mantissa."""
    mantissa, exponent = jnp.frexp(up(x))
    return mantissa, exponent


@register("hash_tensor")
def hash_tensor(x: jax.Array, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0) -> jax.Array:
    """Exclusive or of the numbers as 64-bit words: floats by the bits of their float64 value (mode 0, the only one)."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        words = lax.bitcast_convert_type(as_dtype(x, np.float64), np.uint64)
    else:
        words = as_dtype(as_dtype(x, np.int64) if x.dtype.kind == "i" else x, np.uint64)
    over = axes(list(dim), x.ndim)
    result = lax.reduce(words, np.uint64(0), lax.bitwise_xor, over)
    return jnp.expand_dims(result, over) if keepdim else result
