"""Cost of an operation: floating-point operations, from the shapes of its operands, and the bytes that it moves.

A multiplication and an addition count as two operations.  Only products and convolutions have a count.  The fronts find
the dimensions: `flops` takes torch's names; JAX and StableHLO write them beside each operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from xla_amp.common import units
from xla_amp.common.events import DecisionRecord

Shape: TypeAlias = tuple[int, ...]


def product(left: Sequence[Any], result: Sequence[Any], contracted: Collection[int]) -> int | None:
    """Operations of a product whose left operand is summed over its dimensions `contracted`; None for unknown sizes."""
    return None if _unknown(left, result) else 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)


def convolution(weight: Sequence[Any], result: Sequence[Any], features: int) -> int | None:
    """Operations of a convolution; `features` is the dimension of the weight that counts output features."""
    return None if _unknown(weight, result) else 2 * math.prod(result) * math.prod(weight) // max(1, weight[features])


def moved(record: DecisionRecord) -> int | None:
    """Bytes of operands and results; None where shapes are not known.  A size that is not known counts as 1."""
    if record.bytes is not None:
        return record.bytes
    values = [*zip(record.shapes, record.used, strict=False), *zip(record.result_shapes, record.result, strict=False)]
    if len(values) != len(record.used) + len(record.result) or not values:
        return None
    return sum(math.prod(max(size, 1) for size in shape) * units.bits(dtype) // 8 for shape, dtype in values)


def _unknown(*shapes: Sequence[Any]) -> bool:
    return any(not isinstance(size, int) or size < 0 for shape in shapes for size in shape)


def _attention(operands: Sequence[Shape], result: Shape) -> int:
    """The two products of an attention: scores, then values."""
    query, key, value = operands[:3]
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


_FORMULAS: Final[Mapping[str, Callable[[Sequence[Shape], Shape], int | None]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("bmm", "dot", "linear", "matmul", "mm", "mv", "vdot"),
            lambda operands, result: product(operands[0], result, [-1]),
        ),
        **dict.fromkeys(("addmm", "addmv", "baddbmm"), lambda operands, result: product(operands[1], result, [-1])),
        **dict.fromkeys(("conv1d", "conv2d", "conv3d"), lambda operands, result: convolution(operands[1], result, 0)),
        **dict.fromkeys(
            ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
            lambda operands, result: convolution(operands[1], operands[0], 0),
        ),
        "scaled_dot_product_attention": _attention,
    }
)
"""Packet -> shapes of operands and result -> operations."""


def flops(operation: str, operands: Sequence[Shape], results: Sequence[Shape]) -> int | None:
    """Operations of one call of torch; None for other operations and unknown sizes.

    Example:
        >>> flops("linear", [(4, 8), (16, 8), (16,)], [(4, 16)])
        1024
    """
    formula = _FORMULAS.get(operation.partition(".")[0])
    if formula is None or not results or _unknown(*operands, *results):
        return None
    try:
        return formula(operands, results[0])
    except IndexError:  # an overload with other operands, or a nested tensor
        return None
