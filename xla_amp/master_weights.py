"""Weights in 16 bits that train as if they had more: one set of formulas for every array library.

A weight that is stored in bfloat16 loses updates of less than half a unit in its last place (2**-9 of its size).  Three
remedies, in which the update itself is always float32:

- *split*: float32 is bfloat16 with 16 more bits.  The weight holds the upper half, rounded to nearest, the optimizer's
  state the difference to it as int16.  Together they are the float32 value to the bit.
- *compensated* (Kahan 1965): the state holds the rounding error of the last update, as bfloat16.
- *stochastic*: the weight is rounded up or down at random, so that its mean is the float32 value.  The noise is a
  function of a seed, a count and the index of the element, without a sequence: it is the same on every device.

Rounding to nearest is to even in IEEE 754.  Here bfloat16's is away from zero in a tie (one of 65,536 values): rounded
to even, 65,537 float32 values would share an upper half, one more than 16 bits can tell apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

FP32: Final = "float32"
BF16: Final = "bfloat16"


class Arrays(NamedTuple):
    """The functions of an array library that the formulas need; dtypes are NumPy's names."""

    cast: Callable[[Any, str], Any]
    """``cast(x, dtype)``: conversion; of integers modulo their range."""
    bits: Callable[[Any, str], Any]
    """``bits(x, dtype)``: the same bits as another dtype of the same size."""
    where: Callable[[Any, Any, Any], Any]


def rounded(arrays: Arrays, x: Any, dtype: str) -> Any:
    """float32 to a 16-bit `dtype`, to nearest; in bfloat16 away from zero in a tie."""
    near = arrays.cast(x, dtype)
    return arrays.where(x == x, _upper(arrays, arrays.bits(x, "int32") + 0x8000), near) if dtype == BF16 else near


def lower(arrays: Arrays, x: Any, upper: Any) -> Any:
    """int16: what float32 `x` has beside ``upper = rounded(x)`` (bfloat16)."""
    return arrays.cast(arrays.bits(x, "int32") - _widened(arrays, upper), "int16")


def joined(arrays: Arrays, upper: Any, lower: Any) -> Any:
    """float32 from its two halves."""
    return arrays.bits(_widened(arrays, upper) + arrays.cast(lower, "int32"), FP32)


def rounded_at_random(arrays: Arrays, x: Any, noise: Any) -> Any:
    """float32 to bfloat16, up or down with a mean of `x`; `noise` is int32, evenly from 0 to 0xFFFF.

    A value that bfloat16 has stays, whatever the noise.
    """
    return arrays.where(x == x, _upper(arrays, arrays.bits(x, "int32") + noise), arrays.cast(x, BF16))


def noise(index: Any, seed: Any, count: Any, stream: int) -> Any:
    """int32 from 0 to 0xFFFF for each element.

    Args:
        index: int32, number of the element.
        seed, count: int32 (); `count` grows by one with each step.
        stream: tells tensors of one seed apart.
    """
    key = _mixed(seed ^ _mixed(count * 0x1E3779B1 + stream * 0x51ED2705 % 2**31))
    return _mixed(_mixed(index ^ key) + key) & 0xFFFF


def _mixed(x: Any) -> Any:
    """A bijection of 32 bits in which each bit of `x` changes half of the result's.

    Shifts are of int32, so their upper bits, copies of the sign, are masked.  Multipliers and shifts: the public-domain
    "lowbias32" (Wellons 2018, "Prospecting for Hash Functions").
    """
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def _upper(arrays: Arrays, bits: Any) -> Any:
    return arrays.bits(arrays.cast(bits >> 16, "int16"), BF16)


def _widened(arrays: Arrays, upper: Any) -> Any:
    """int32: bits of a bfloat16 as the upper half."""
    return arrays.cast(arrays.bits(upper, "int16"), "int32") << 16
