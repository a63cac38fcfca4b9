"""Floating-point operations of products and convolutions of torch, from the shapes of their operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

Shape: TypeAlias = tuple[int, ...]


def _of_matrix(position: int) -> Callable[[Sequence[Shape], Shape], int]:
    """A product whose operand at `position` is summed over its last dimension."""
    return lambda operands, result: 2 * math.prod(result) * operands[position][-1]


def _convolution(operands: Sequence[Shape], result: Shape) -> int:
    return 2 * math.prod(result) * math.prod(operands[1][1:])


def _transposed(operands: Sequence[Shape], result: Shape) -> int:
    return 2 * math.prod(operands[0]) * math.prod(operands[1][1:])


def _attention(operands: Sequence[Shape], result: Shape) -> int:
    """The two products of an attention: scores, then values."""
    query, key, value = operands[:3]
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


_FORMULAS: Final[Mapping[str, Callable[[Sequence[Shape], Shape], int]]] = MappingProxyType(
    {
        **dict.fromkeys(("bmm", "dot", "linear", "matmul", "mm", "mv", "vdot"), _of_matrix(0)),
        **dict.fromkeys(("addmm", "addmv", "baddbmm"), _of_matrix(1)),
        **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
        **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed),
        "scaled_dot_product_attention": _attention,
    }
)
"""Packet -> shapes of operands and result -> operations."""


def flops(operation: str, operands: Sequence[Shape], results: Sequence[Shape]) -> int | None:
    """Operations of one call, a multiplication and an addition each; None for other operations and unknown sizes.

    Example:
        >>> flops("linear", [(4, 8), (16, 8), (16,)], [(4, 16)])
        1024
    """
    formula = _FORMULAS.get(operation.partition(".")[0])
    if formula is None or not results or any(size < 0 for shape in (*operands, *results) for size in shape):
        return None
    try:
        return formula(operands, results[0])
    except IndexError:  # an overload with other operands, or a nested tensor
        return None
