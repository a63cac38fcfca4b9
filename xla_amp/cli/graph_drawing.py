"""Draw a program's operations as an SVG graph, coloured by dtype."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any, NamedTuple

from xla_amp.cli.documents import dtype_kind
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.tools import inspection, widen

MAX_OPERATIONS = 400
"""Operations that are drawn; larger drawings are not readable."""

_WIDTH, _HEIGHT, _GAP, _STEP, _MARGIN = 148, 22, 12, 46, 16


class Graph(NamedTuple):
    """A drawing, and a note on the operations that it omits."""

    svg: str
    note: str


class _Node(NamedTuple):
    label: str
    title: str
    kind: str
    """Colour of the box: the dtype of the computation."""
    result: str
    """Colour of the outgoing edges: the dtype of the result."""
    parents: tuple[int, ...]
    row: int


def draw_graph(module: ir.MlirModule, why: Callable[[Any], str] | None = None) -> Graph:
    """Draws the entry function with its calls inlined; a loop is one operation.

    Args:
        module: the program.
        why: operation -> text for its tooltip, e.g. the reason for its colour; may be empty.
    """
    nodes, left = _nodes(widen.inlined(module), why or (lambda _: ""))
    nodes = _moved_down(nodes)
    rows: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        rows.setdefault(node.row, []).append(number)
    x = _left_edges(nodes, rows)
    width = max(x.values(), default=0) + _WIDTH + 2 * _MARGIN
    height = (max(rows, default=0) + 1) * _STEP + 2 * _MARGIN
    lines = [_edge(nodes, x, parent, number) for number, node in enumerate(nodes) for parent in node.parents]
    boxes = [_box(node, x[number]) for number, node in enumerate(nodes)]
    drawing = "\n".join([*lines, *boxes])
    note = f"The first {len(nodes)} operations; {left} more are not drawn." if left else f"{len(nodes)} operations."
    return Graph(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">\n{drawing}\n</svg>',
        f"{note} Constants are left out.",
    )


def _nodes(module: ir.MlirModule, why: Callable[[Any], str]) -> tuple[list[_Node], int]:
    """Nodes of the used arguments, then of the operations; and the number of operations that are not drawn."""
    block = ir.entry(module).regions[0].blocks[0]
    *operations, _ = [view.operation for view in block.operations]
    drawn = [each for each in operations if inspection.structure_of(each) != "constant"]
    shown = drawn[:MAX_OPERATIONS]
    nodes: list[_Node] = []
    number: dict[Any, int] = {}
    read = {operand for operation in shown for operand in operation.operands}
    for index, argument in enumerate(block.arguments):
        if argument in read and index < MAX_OPERATIONS:
            number[argument] = len(nodes)
            kind = ir.tensor_type(argument.type)
            text = f"argument {index}  {inspection.type_text(kind)}"
            colour = _colour(argument)
            nodes.append(_Node(text, text, colour, colour, (), 0))
    for operation in shown:
        parents = tuple(dict.fromkeys(number[each] for each in operation.operands if each in number))
        row = 1 + max((nodes[parent].row for parent in parents), default=-1)
        number.update((result, len(nodes)) for result in operation.results)
        nodes.append(_operation(operation, why(operation), parents, row))
    return nodes, len(drawn) - len(shown)


def _operation(operation: Any, why: str, parents: tuple[int, ...], row: int) -> _Node:
    kinds = [ir.tensor_type(result.type) for result in operation.results]
    name = inspection.short_name(operation)
    types = ", ".join(map(inspection.type_text, kinds))
    inside = sum(1 for _ in ir.operations(operation)) if inspection.structure_of(operation) != "body" else 0
    words = [
        f"{name}: {types}",
        inspection.source_name(operation),
        why,
        f"{inside} operations inside" if inside else "",
    ]
    result = _colour(operation.results[0]) if kinds else "other"
    structure = inspection.structure_of(operation)
    kind = "cast" if structure == "cast" else _colour(operation.operands[0]) if structure == "contraction" else result
    return _Node(f"{name}  {types}", "\n".join(filter(None, words)), kind, result, parents, row)


def _colour(value: Any) -> str:
    kind = ir.tensor_type(value.type)
    return dtype_kind(kind.element if kind else "") or "other"


def _moved_down(nodes: list[_Node]) -> list[_Node]:
    """Moves each node to the row above its first user, for shorter edges."""
    first: dict[int, int] = {}
    moved = list(nodes)
    for number in reversed(range(len(nodes))):
        row = first.get(number, nodes[number].row + 1) - 1
        moved[number] = nodes[number]._replace(row=row)
        for parent in nodes[number].parents:
            first[parent] = min(first.get(parent, row), row)
    return moved


def _left_edges(nodes: list[_Node], rows: dict[int, list[int]]) -> dict[int, float]:
    """x position of each node: as near below the mean of its parents as its row has room."""
    x: dict[int, float] = {}
    for _, numbers in sorted(rows.items()):
        wanted = {
            number: sum(x[parent] for parent in nodes[number].parents) / max(1, len(nodes[number].parents))
            for number in numbers
        }
        free = 0.0
        for number in sorted(numbers, key=wanted.__getitem__):
            x[number] = max(free, wanted[number])
            free = x[number] + _WIDTH + _GAP
    return x


def _box(node: _Node, left: float) -> str:
    top = _MARGIN + node.row * _STEP
    label = node.label if len(node.label) <= 24 else node.label[:23] + "…"
    return (
        f'<g><title>{html.escape(node.title)}</title><rect class="{node.kind}" x="{left + _MARGIN:.0f}" y="{top}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" rx="4"/><text x="{left + _MARGIN + 6:.0f}" y="{top + 15}">'
        f"{html.escape(label)}</text></g>"
    )


def _edge(nodes: list[_Node], x: dict[int, float], parent: int, child: int) -> str:
    x1, x2 = (x[number] + _MARGIN + _WIDTH / 2 for number in (parent, child))
    y1, y2 = _MARGIN + nodes[parent].row * _STEP + _HEIGHT, _MARGIN + nodes[child].row * _STEP
    bend = (y2 - y1) / 2
    curve = f"M{x1:.0f} {y1}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2}"
    return f'<path class="{nodes[parent].result}" d="{curve}"/>'
