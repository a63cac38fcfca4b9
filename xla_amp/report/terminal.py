"""A document as text for a terminal."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Final

from xla_amp.common import tables
from xla_amp.errors import printable
from xla_amp.report import paths, units
from xla_amp.report.document import Cell, Column, Document, Finding, Table

WIDTH: Final = 120
"""Characters of a line where there is no terminal."""
MOST_ROWS: Final = 40
"""Rows of a table that are printed; the page has all."""
_LEAST: Final = 12
"""Characters that a cut cell keeps; of a name 18."""
_BARS: Final = "▁▂▃▄▅▆▇█"


def text(document: Document, width: int | None = None, *, most: int = MOST_ROWS) -> str:
    """The document as text.

    Args:
        document: what to show.
        width: characters of a line; default: those of the terminal, or `WIDTH` where there is none.
        most: rows of the first table.
    """
    width = width or shutil.get_terminal_size((WIDTH, 40)).columns
    parts = [document.title]
    if document.facts:
        names = max(len(name) for name, _ in document.facts)
        parts.append(
            "\n".join(_wrapped(f"{name.ljust(names)}  {value}", names + 2, width) for name, value in document.facts)
        )
    parts += [_finding(each, width) for each in document.findings]
    tables_ = [each for each in document.tables if each.rows and not each.page_only]
    parts += [_table(each, width, MOST_ROWS if number else most) for number, each in enumerate(tables_)]
    return printable("\n\n".join(parts))


def lines(table: Table, width: int = 10**9, most: int = MOST_ROWS) -> tuple[list[Column], list[list[str]], int]:
    """The columns that fit into `width`; the rows, of which the `most` with the largest numbers; how many there are.

    Equal rows are one, also of numbered layers (``h.0-11``).
    """
    rows = [row for row in table.rows if row.state != "plumbing"]
    filled = [any(row.cells[i] not in (None, "") for row in rows) for i in range(len(table.columns))]
    shown = [i for i, column in enumerate(table.columns) if filled[i] and not column.detail] or [0]
    while True:
        columns = [table.columns[i] for i in shown]
        merged = _merged(columns, [[row.cells[i] for i in shown] for row in rows])
        total = len(merged)
        if total > most:
            merged = merged[:most] if table.ranked else _largest(merged, columns, most)
        written = [[_cell(value, column) for value, column in zip(row, columns, strict=True)] for row in merged]
        widths = [max(map(len, (column.name, *cells))) for column, *cells in zip(columns, *written, strict=True)]
        needed = [
            wide if column.numeric else min(wide, max(_LEAST if index > 2 else _LEAST * 3 // 2, len(column.name)))
            for index, (wide, column) in enumerate(zip(widths, columns, strict=True))
        ]
        room = width - _borders(len(columns))
        if sum(needed) <= room or len(columns) == 1:
            break
        # The columns to the right say the least, but for the line of the program.
        least = [place for place, index in enumerate(shown) if place and table.columns[index].kind != "place"]
        shown.pop(least[-1] if least else -1)
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda i: (widths[i] > needed[i], widths[i]))
        if widths[widest] <= needed[widest]:
            break
        widths[widest] -= 1
    cells = [_cut([row[i] for row in written], widths[i], column.kind) for i, column in enumerate(columns)]
    return columns, [list(row) for row in zip(*cells, strict=True)], total


def _largest(rows: list[list[Cell]], columns: Sequence[Column], most: int) -> list[list[Cell]]:
    """The `most` rows that matter most, in their order: of most FLOP, then bytes; or of the least headroom."""
    by = [(i, column.least) for i, column in enumerate(columns) if column.kind in ("flops", "bytes") or column.least]

    def rank(at: int) -> tuple[float, ...]:
        numbers = [(rows[at][i], least) for i, least in by]
        return (*((n if least else -n) if isinstance(n, int | float) else math.inf for n, least in numbers), at)

    return [rows[at] for at in sorted(sorted(range(len(rows)), key=rank)[:most])]


def _borders(columns: int) -> int:
    """Characters between the columns of a table as `tables.plain` draws it."""
    return 2 * (columns - 1)


def _finding(finding: Finding, width: int) -> str:
    words = [_wrapped(finding.question, 0, width), _wrapped(f"  {finding.answer}", 2, width)]
    words += [_wrapped(f"  - {what}" + (f": {where}" if where else ""), 4, width) for what, where in finding.items]
    return "\n".join(words)


def _wrapped(line: str, indent: int, width: int) -> str:
    if len(line) <= width:
        return line
    indent = min(indent, width // 2)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def _table(table: Table, width: int, most: int) -> str:
    columns, written, total = lines(table, width, most)
    hidden = sum(row.state == "plumbing" for row in table.rows)
    notes = [_wrapped(table.note, 0, width)] if table.note else []
    if len(written) < total:
        notes.append(f"and {total - len(written)} more rows")
    if hidden:
        are = "row of integers and plumbing is" if hidden == 1 else "rows of integers and plumbing are"
        notes.append(_wrapped(f"{hidden} {are} left out", 0, width))
    names = [column.name for column in columns]
    shown = tables.plain(names, written, numeric=[column.name for column in columns if column.numeric])
    return "\n".join([f"{table.title}:", *([shown] if written else []), *notes])


def _cell(value: Cell, column: Column) -> str:
    if column.kind == "series" and value is not None and not isinstance(value, str | int | float):
        return sparkline(value)
    return units.cell(value, column.kind)


def sparkline(values: Sequence[float | None], width: int = 16) -> str:
    """A series as bars of text, at most `width` of them, each the largest of its part; ``!`` where it is not finite.

    Example:
        >>> sparkline([0.0, 1.0, 2.0, float("inf")])
        '▁▄█!'
    """
    size = -(-len(values) // width) if values else 1
    parts = [[v for v in values[i : i + size] if v is not None] for i in range(0, len(values), size)]
    finite = [v for part in parts for v in part if v - v == 0]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def bar(part: list[float]) -> str:
        if not part:
            return " "
        if any(v - v != 0 for v in part):
            return "!"
        return _BARS[int((max(part) - low) / (high - low) * (len(_BARS) - 1)) if high > low else 0]

    return "".join(map(bar, parts))


def _merged(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> list[list[Cell]]:
    """Joins rows that differ in summed columns or the numbers of their scope only, in order of first appearance."""
    summed = [i for i, column in enumerate(columns) if column.sum]
    scope = next((i for i, column in enumerate(columns) if column.kind == "scope"), None)
    if not summed:
        return [list(row) for row in rows]
    found: dict[Any, tuple[list[Cell], list[str]]] = {}
    for row in rows:
        path = str(row[scope] or "") if scope is not None else ""
        pattern = paths.pattern(path)
        rest = (tuple(v) if isinstance(v, list) else v for i, v in enumerate(row) if i not in summed and i != scope)
        cells, seen = found.setdefault((pattern, *rest), (list(row), []))
        if seen:
            for i in summed:
                one, other = cells[i], row[i]
                if isinstance(other, int | float):
                    cells[i] = other + (one if isinstance(one, int | float) else 0)
        seen.append(path)
    if scope is not None:
        for cells, seen in found.values():
            cells[scope] = paths.together(seen)
    return [cells for cells, _ in found.values()]


def _cut(cells: Sequence[str], width: int, kind: str) -> list[str]:
    """The cells of a column, cut to `width` where most of them still differ, as ``block_0`` and ``block_1`` do."""
    ways = (_left, _right) if kind in ("name", "place") else (_middle, _right, _left) if kind == "scope" else (_right,)
    cut = [[way(cell, width) if len(cell) > width else cell for cell in cells] for way in ways]
    return max(cut, key=lambda found: len(set(found)))


def _left(cell: str, width: int) -> str:
    return "…" + cell[1 - width :]


def _right(cell: str, width: int) -> str:
    return cell[: width - 1] + "…"


def _middle(cell: str, width: int) -> str:
    kept = width // 2
    return f"{cell[: width - 1 - kept]}…{cell[-kept:]}"
