"""Which products of a step give weights their gradients.

A trace has no autograd graph.  But the gradient of a weight is a product of a value that is multiplied with the weight,
too: the data in the forward pass, or the gradient of the result, from which that of the data comes.  It has as many
elements as the weight.  A weight is an input of the program.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from xla_amp.lazy.graph.tape import Tape

_SAME_VALUE: Final = frozenset({"_to_copy", "clone", "mark_sharding", "view"})
"""Operations whose result is their operand in another dtype or form."""
_PRODUCTS: Final = frozenset({"addmm", "baddbmm", "bmm", "mm"})
"""Their last two operands are the factors."""
_GRADIENTS: Final = frozenset({"bmm", "mm"})
"""The products that autograd's formulas for `_PRODUCTS` use."""
_LINEAR_BACKWARD: Final = "linear_backward"
_OF_LAYERS: Final = frozenset({"convolution_backward", "convolution_backward_overrideable", _LINEAR_BACKWARD})
"""They give the gradient of the weight, their third operand, together with that of the data."""

_SUMS: Final = frozenset(
    {
        "embedding_dense_backward",
        "native_batch_norm_backward",
        "native_group_norm_backward",
        "native_layer_norm_backward",
        "sum",
        "sum.dim_IntList",
    }
)
"""They sum in float32.  XLA:TPU sums the parts of devices in half, if the result is converted to that right after."""


_JOINS: Final = frozenset({"cat", "stack"})
"""Operations that XLA:GPU repeats in each product that reads their result."""


def find(tape: Tape) -> tuple[frozenset[int], frozenset[int]]:
    """Numbers of the first results of operations that give weights their gradients; and results to compute once.

    A gradient with regard to an input of the program that is no weight counts as well; that of a value which is
    computed from a weight (``weight_norm``) does not, except in `_OF_LAYERS`.  The second are results of `_JOINS` that
    several products read: the gradient of a layer whose result is split.
    """
    origin: list[int] = []
    """Value -> the value that it is another form of."""
    sizes = [0 if out is None else out.size for out in tape.specs()]
    inputs: set[int] = set()
    partners: dict[int, list[int]] = {}
    """Value -> inputs that it was multiplied with."""
    found: set[int] = set()
    products: list[tuple[int, int]] = []
    """(result, factor whose other factor is computed)."""
    readers: Counter[int] = Counter()
    joined: set[int] = set()
    for node in tape:
        first, instruction, operands = node.first, node.instruction, node.inputs
        name = instruction.name
        if node.is_parameter:
            inputs.add(first)
        elif name in _OF_LAYERS:
            found.add(first)
            if name == _LINEAR_BACKWARD:  # its products read the gradient of the layer's result
                readers[origin[operands[1]]] += 2
        elif name in _SUMS:
            results = {out.size for out in instruction.outs if out is not None}
            if any(sizes[number] in results for number in inputs):
                found.add(first)
        elif name in _PRODUCTS:
            factors = [origin[operand] for operand in operands[-2:]]
            readers.update(set(factors))
            for value, other in (factors, factors[::-1]):
                if other in inputs:
                    partners.setdefault(value, []).append(other)
                elif name in _GRADIENTS:
                    products.append((first, value))
        elif name in _JOINS:
            joined.add(first)
        same = name in _SAME_VALUE and len(operands) == 1
        origin += [origin[operands[0]] if same else result for result in node.results]
    found.update(
        result
        for result, factor in products
        if any(sizes[weight] == sizes[result] for weight in partners.get(factor, ()))
    )
    return frozenset(found), frozenset(result for result in joined if readers[result] > 1)
