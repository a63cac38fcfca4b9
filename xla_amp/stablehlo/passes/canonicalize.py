"""Canonicalize transpose(dot(a, b)) to dot(b, a).

Differentiation gives weight gradients as ``transpose(dot(dy, x))``, which equals ``dot(x, dy)``.  XLA:CPU cannot run
the first form if low operands are summed over several dimensions into a float32 result
(jaxlib 0.10.2: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32").
"""

from __future__ import annotations

from typing import Any, Final

from xla_amp.stablehlo import ir

_NUMBERS: Final = "dot_dimension_numbers"
_PERMUTATION: Final = "permutation"


def untranspose(operation: Any) -> bool:
    """Swaps the operands of a dot if that saves a transpose of its result; needs a current MLIR location.

    Returns:
        Whether it was changed.
    """
    if _NUMBERS not in operation.attributes:
        return False
    uses = list(operation.results[0].uses)
    if len(uses) != 1:
        return False
    user = uses[0].owner.operation
    stablehlo = ir.dialect()
    numbers = stablehlo.DotDimensionNumbers(operation.attributes[_NUMBERS])
    if _PERMUTATION not in user.attributes or list(numbers.lhs_batching_dimensions):
        return False
    left, right = operation.operands
    summed = list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)
    free = left.type.rank - len(summed[0]), right.type.rank - len(summed[1])
    exchanged = [*range(free[0], sum(free)), *range(free[0])]
    if list(ir.mlir().DenseI64ArrayAttr(user.attributes[_PERMUTATION])) != exchanged:
        return False
    operation.operands[0], operation.operands[1] = right, left
    operation.attributes[_NUMBERS] = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=[],
        rhs_batching_dimensions=[],
        lhs_contracting_dimensions=summed[1],
        rhs_contracting_dimensions=summed[0],
    )
    operation.results[0].set_type(user.results[0].type)
    user.results[0].replace_all_uses_with(operation.results[0])
    user.erase()
    return True
