"""The meaning of a cast: from the dtypes of an operation's operands to those that it computes in.

Every front asks `cast_dtypes`, so one rule means the same on all of them.  The reference is torch's dispatcher
(``ATen/autocast_mode.h``): ``cached_cast`` for ``low`` and ``fp32``, ``set_opt_dtype``, ``append_dtype`` and
``promote_type``.  torch raises for a ``promote`` of bfloat16 with float16; here the result is float32.
``fp32_inside`` is what torch's kernels compute from low operands.
"""

from __future__ import annotations

import functools
from typing import Generic, NamedTuple, TypeVar

from xla_amp.common.types import Cast
from xla_amp.errors import PolicyError

D = TypeVar("D")
"""A dtype as the front writes it; hashable."""


class CastDtypes(NamedTuple, Generic[D]):
    """What one operation computes in."""

    operands: tuple[D | None, ...]
    """dtype of each operand after the cast; None for an operand that takes no part."""
    result: D | None
    """dtype that the result is asked for; None where the operation's own rule of promotion gives it."""


@functools.lru_cache(maxsize=4096)
def cast_dtypes(
    cast: Cast, operands: tuple[D | None, ...], low: D, float32: D, *, mixed: bool = True, asks_result: bool = True
) -> CastDtypes[D]:
    """The dtypes of one operation under a cast.

    Args:
        cast: the policy's.
        operands: the dtype of each operand that may be cast; None for the others: numbers, integers,
            float64, tensors of another device.
        low: the region's low dtype.
        float32: float32, as the front writes it.
        mixed: whether the operation accepts operands of two dtypes and promotes them itself.  If not, ``keep`` gives
            them their widest dtype, which is what the promotion would compute in.
        asks_result: whether the operation can be asked for a float32 result of low operands.  If not, ``fp32_out`` and
            ``fp32_append`` cast the operands to float32, which is exact, so the values are the same.

    Raises:
        PolicyError: the cast is ``ban``; a front raises its own error first.

    Example:
        >>> cast_dtypes("promote", ("bfloat16", "float32", None), "bfloat16", "float32").operands
        ('float32', 'float32', None)
    """
    if cast == "ban":
        raise PolicyError("a banned operation has no dtypes")
    if cast == "fp32_inside":
        return CastDtypes(_all(operands, float32), operands[0] if operands else None)
    if cast == "low_fp32_out":
        return CastDtypes(_all(operands, low), float32)
    if cast in ("fp32_out", "fp32_append"):
        if operands and operands[0] is not None:  # torch looks at the first operand only
            if asks_result:
                return CastDtypes(operands, float32)
            cast = "fp32"
        else:
            cast = "keep"
    given = {dtype for dtype in operands if dtype is not None}
    target: D | None = None
    if cast == "low":
        target = low
    elif cast == "fp32":
        target = float32
    elif len(given) > 1 and (cast == "promote" or not mixed):
        target = float32  # of two dtypes one is float32, or they are bfloat16 and float16, which only float32 holds
    if target is None:
        return CastDtypes(operands, None)
    return CastDtypes(_all(operands, target), None)


def _all(operands: tuple[D | None, ...], target: D) -> tuple[D | None, ...]:
    return tuple(None if dtype is None else target for dtype in operands)
