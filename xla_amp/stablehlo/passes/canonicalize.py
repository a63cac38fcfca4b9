"""Canonicalize transpose(dot(a, b)) to dot(b, a), and fold pairs of transposes.

Differentiation gives weight gradients as ``transpose(dot(dy, x))``, which equals ``dot(x, dy)``; the gradient of an
embedding that also makes the logits (``x @ E.T``) is ``transpose(transpose(dot(dy, x)))``, which equals ``dot(dy, x)``.
XLA:CPU cannot run a transposed product of low operands into a float32 result (jaxlib 0.10.2: "Unsupported element type
for DotThunk::Execute: BF16 x BF16 = F32").

A sharding names the axes of one result.  What takes the place of a transpose gets its sharding; where that has none and
the other has one, both stay.
"""

from __future__ import annotations

from typing import Any, Final

from xla_amp.stablehlo import ir, surgery

_NUMBERS: Final = "dot_dimension_numbers"
_PERMUTATION: Final = "permutation"
_SHARDINGS: Final = ("mhlo.sharding", "sdy.sharding")
"""Attributes that name the axes of an operation's result."""
_FACTORS: Final = "sdy.sharding_rule"
"""The attribute that names the axes of an operation's operands and result."""


def untranspose(operation: Any) -> bool:
    """Swaps the operands of a dot if that saves a transpose of its result; needs a current MLIR location.

    Returns:
        Whether it was changed.
    """
    if _NUMBERS not in operation.attributes:
        return False
    changed = _fold_pairs(operation.results[0])
    users = [use.owner.operation for use in operation.results[0].uses]
    stablehlo = ir.dialect()
    numbers = stablehlo.DotDimensionNumbers(operation.attributes[_NUMBERS])
    batches = list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions)
    left, right = operation.operands
    summed = list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)
    lead = len(batches[0])
    free = left.type.rank - len(summed[0]) - lead, right.type.rank - len(summed[1]) - lead
    exchanged = [*range(lead), *range(lead + free[0], lead + sum(free)), *range(lead, lead + free[0])]
    if not users or any(_permutation(user) != exchanged for user in users):
        return changed
    shardings = [_shardings(user) for user in users]
    fits = all(each == shardings[0] for each in shardings) and _shardings(operation).keys() <= shardings[0].keys()
    if not fits or _FACTORS in operation.attributes:
        return changed
    for name, sharding in shardings[0].items():
        operation.attributes[name] = sharding
    operation.operands[0], operation.operands[1] = right, left
    operation.attributes[_NUMBERS] = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=batches[1],
        rhs_batching_dimensions=batches[0],
        lhs_contracting_dimensions=summed[1],
        rhs_contracting_dimensions=summed[0],
    )
    operation.results[0].set_type(users[0].results[0].type)
    for user in users:
        user.results[0].replace_all_uses_with(operation.results[0])
        user.erase()
    return True


def _fold_pairs(value: Any) -> bool:
    """Replaces transposes of transposes of `value` by one transpose of it, or by `value` where they cancel."""
    changed = False
    todo = [use.owner.operation for use in value.uses if _permutation(use.owner.operation)]
    while todo:
        outer = todo.pop()
        before = _permutation(outer)
        for inner in [use.owner.operation for use in outer.results[0].uses]:
            after = _permutation(inner)
            if not after or _FACTORS in inner.attributes:
                continue
            both = [before[axis] for axis in after]
            if both == sorted(both):
                if _shardings(inner) not in ({}, _shardings(value.owner)):
                    continue
                inner.results[0].replace_all_uses_with(value)
                inner.erase()
            else:
                inner.attributes[_PERMUTATION] = ir.mlir().DenseI64ArrayAttr.get(both)
                inner.operands[0] = value
                todo.append(inner)
            changed = True
        if changed and surgery.is_unused(outer):
            outer.erase()
    return changed


def _shardings(operation: Any) -> dict[str, Any]:
    return {name: operation.attributes[name] for name in _SHARDINGS if name in operation.attributes}


def _permutation(operation: Any) -> list[int]:
    """Axes of a transpose; empty for another operation."""
    if operation.name != "stablehlo.transpose":
        return []
    return list(ir.mlir().DenseI64ArrayAttr(operation.attributes[_PERMUTATION]))
