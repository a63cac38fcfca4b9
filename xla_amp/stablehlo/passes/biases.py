"""Which operands of an addition are biases of products: arguments or constants along a product's feature axes.

`xla_amp.analysis.beside_low` has the rule; this file follows weights and products through the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from xla_amp.analysis import beside_low
from xla_amp.analysis.beside_low import Axes
from xla_amp.analysis.value_graph import settled
from xla_amp.stablehlo import sizes
from xla_amp.stablehlo.passes.cast_graph import CastGraph, CastNode


def biases(graph: CastGraph) -> set[tuple[int, int]]:
    """Pairs of an addition's number among the nodes, and the slot that it reads as a bias."""
    weights = _given(graph)
    first = [number for number in weights if not graph.nodes[number].inputs]
    given = _followed(graph, first, weights, _as_weight)
    contractions = [number for number, node in enumerate(graph.nodes) if node.structure == "contraction"]
    all_nodes = range(len(graph.nodes))
    products = _followed(graph, contractions, all_nodes, lambda node, known: _as_product(node, known, given))
    found = set()
    for number, node in enumerate(graph.nodes):
        if node.adds:
            for one, other in (node.operands, reversed(node.operands)):
                shapes = sizes.shape_of(one.value), sizes.shape_of(other.value)
                if beside_low.is_bias(given.get(one.slot, ()), shapes[0], products.get(other.slot, ()), shapes[1]):
                    found.add((number, one.slot))
    return found


def _given(graph: CastGraph) -> set[int]:
    """Nodes that hold arguments of the program and constants, moved but not computed with."""
    found = {
        number
        for number, node in enumerate(graph.nodes)
        if node.outputs and (node.structure == "constant" or (node.boundary and node.writes) or node.moves)
    }
    return settled(found, lambda number, given: given.issuperset(graph.before[number]), graph.after.__getitem__)


def _followed(
    graph: CastGraph,
    first: Iterable[int],
    inside: Container[int],
    axes_of: Callable[[CastNode, dict[int, Axes]], Axes],
) -> dict[int, Axes]:
    """`Axes` of the slots that the nodes `first` write, and those that follow from them among `inside`."""
    found: dict[int, Axes] = {}
    todo = sorted(first, reverse=True)
    while todo:
        number = todo.pop()
        node = graph.nodes[number]
        axes = axes_of(node, found)
        for slot in node.outputs if axes else ():
            if found.get(slot) != axes:
                found[slot] = axes
                todo += [user for user in graph.users[slot] if user in inside]
    return found


def _as_weight(node: CastNode, known: dict[int, Axes]) -> Axes:
    if not node.inputs:
        return (frozenset(range(len(sizes.shape_of(node.writes[0])))),)
    if node.index is not None:  # a value that is passed on from several places varies as each of them
        axes = [known[slot][0] for slot in node.inputs if known.get(slot)]
        return (frozenset[int]().union(*axes),) if axes else ()
    return _moved(node, known, weight=True)


def _as_product(node: CastNode, known: dict[int, Axes], given: dict[int, Axes]) -> Axes:
    if node.structure == "contraction":
        found = sizes.contraction(node.operation)
        if node.colour != "allow" or found is None or len(node.operands) != 2:
            return ()
        first, second = (each.slot in given for each in node.operands)
        return found.axes((first, second))
    if node.adds:
        return beside_low.axes_of_sum([known[slot] for slot in node.inputs if slot in known])
    if node.index is not None:  # one of several values, as the result of a branch: a product if each of them is one
        each = {known.get(slot, ()) for slot in node.inputs}
        return each.pop() if len(each) == 1 else ()
    return _moved(node, known, weight=False) if node.moves and len(set(node.inputs)) == 1 else ()


def _moved(node: CastNode, known: dict[int, Axes], *, weight: bool) -> Axes:
    axes, attributes = known.get(node.inputs[0], ()), node.operation.attributes
    if not axes or not node.writes:
        return ()
    order, places = (list(attributes[name]) if name in attributes else None for name in ("permutation", _PLACES))
    before, after = sizes.shape_of(node.operands[0].value), sizes.shape_of(node.writes[0])
    return beside_low.axes_after(axes, before, after, order=order, places=places, weight=weight)


_PLACES = "broadcast_dimensions"
