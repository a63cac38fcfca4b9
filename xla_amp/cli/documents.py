"""What a command found, as facts, tables and bars: shown on a terminal or as HTML from the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from xla_amp.diagnose import tables

_MOST = 25
"""Rows of a table that a terminal is given."""


class Bar(NamedTuple):
    """One bar of a chart."""

    label: str
    value: float
    shown: str
    """The value as it is read."""
    kind: str = ""
    """``low``, ``wide`` or nothing: its colour."""


class Chart(NamedTuple):
    """Bars of one unit."""

    title: str
    bars: tuple[Bar, ...]


class Table(NamedTuple):
    """Rows under a title."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    numeric: Collection[str] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A command's answer for people."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    """In HTML only."""
    graph: str = ""
    """SVG, in HTML only."""

    def text(self) -> str:
        """For the terminal."""
        parts = [self.title]
        if self.facts:
            width = max(len(name) for name, _ in self.facts)
            parts.append("\n".join(f"{name.ljust(width)}  {value}" for name, value in self.facts))
        for table in self.tables:
            if table.rows:
                shown = tables.for_terminal(table.columns, table.rows[:_MOST], numeric=table.numeric)
                left = len(table.rows) - _MOST
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
    """Colour of an element type: ``low`` for 16 bits and fewer of floating point, ``wide`` for more."""
    if element in ("bf16", "f16", "bfloat16", "float16") or element.startswith(("f8", "f4", "f6")):
        return "low"
    return "wide" if element in ("f32", "f64", "float32", "float64") else ""
