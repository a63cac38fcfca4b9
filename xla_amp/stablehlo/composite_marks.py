"""Marks of operations that are parts of one that a rule decides as a whole (`passes.composite_calls` sets them)."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from xla_amp.stablehlo import ir

MARK: Final = "amp.part"
"""Attribute of a part or an edge: ``part <operation> <number of the group> <path>``, or ``edge ...``."""
LEADS: Final = "amp.leads"
"""Attribute of a part: indices of its operands that decide about the dtype of the group's results."""


class CompositeMark(NamedTuple):
    """What `MARK` says."""

    is_edge: bool
    operation: str
    number: int
    """Of the group."""
    path: str


def mark_of(operation: Any) -> CompositeMark | None:
    """The mark of an operation, or None."""
    if MARK not in operation.attributes:
        return None
    kind, name, number, path = operation.attributes[MARK].value.split(" ", 3)
    return CompositeMark(kind == "edge", name, int(number), path)


def leaders(module: Any) -> dict[int, list[Any]]:
    """Number of a group -> the values that decide about the dtype of its results."""
    found: dict[int, list[Any]] = {}
    for operation in ir.operations(module.operation):
        if LEADS in operation.attributes:
            marked = mark_of(operation)
            values = [operation.operands[index] for index in operation.attributes[LEADS]]
            found.setdefault(marked.number if marked else 0, []).extend(values)
    return found
