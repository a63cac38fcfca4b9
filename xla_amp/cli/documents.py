"""A command's result as facts, tables and charts, rendered as terminal text or, by `html_report`, as HTML."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from xla_amp import tables

_MAX_ROWS = 25
"""Rows of a table that are printed on a terminal."""


class Bar(NamedTuple):
    """One bar of a chart."""

    label: str
    value: float
    shown: str
    """The value as text."""
    kind: str = ""
    """CSS class of the colour: ``low``, ``wide`` or empty."""


class Chart(NamedTuple):
    """A bar chart; all bars have the same unit."""

    title: str
    bars: tuple[Bar, ...]


class Table(NamedTuple):
    """A table with a title."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    numeric: Collection[str] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A command's result in human-readable form."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    """In HTML only."""

    def text(self) -> str:
        """The document as terminal text."""
        parts = [self.title]
        if self.facts:
            width = max(len(name) for name, _ in self.facts)
            parts.append("\n".join(f"{name.ljust(width)}  {value}" for name, value in self.facts))
        for table in self.tables:
            if table.rows:
                shown = tables.for_terminal(table.columns, table.rows[:_MAX_ROWS], numeric=table.numeric)
                left = len(table.rows) - _MAX_ROWS
                note = f"and {left} more rows: --json lists all" if left > 0 else table.note
                parts.append("\n".join(filter(None, (f"{table.title}:", shown, note))))
        return "\n\n".join(parts)


def size(number: float | None) -> str:
    """``1.5 MiB``."""
    if number is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def time(seconds: float | None) -> str:
    """``12.3 us``."""
    if seconds is None:
        return "unknown"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def error(number: float) -> str:
    """``3.1e-03``, and 0 as 0."""
    return "0" if number == 0 else f"{number:.1e}"


def dtype_kind(element: str) -> str:
    """``low`` for floating-point types of at most 16 bits, ``wide`` for wider ones, otherwise empty."""
    if element in ("bf16", "f16", "bfloat16", "float16") or element.startswith(("f8", "f4", "f6")):
        return "low"
    return "wide" if element in ("f32", "f64", "float32", "float64") else ""
