"""`Table`: rows as text that fits the terminal; rich draws it on one, where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, TypeAlias

from xla_amp.errors import printable

Cell: TypeAlias = str | int | float | None
"""None is an empty cell."""

MOST_ROWS: Final = 40
"""Rows that `Table.text` shows."""
_ENDS: Final = frozenset({"layer", "module", "parameter", "rule", "where"})
"""Columns of paths: what differs is in the last parts, and then in the first, so they are cut in the middle."""
_KEPT: Final = "where"
"""The column that no terminal is too narrow for."""
_SHORTEST: Final = {_KEPT: 20, "operation": 13, "rule": 20}
"""Characters that a cut cell keeps; 10 in other columns.  A rule in fewer loses the line of its file."""
_LONGEST: Final = 20
"""Characters of a word, such as a path, that rich leaves whole in every column but the first."""


def terminal_width() -> int:
    """Characters of a line: ``COLUMNS``, or the terminal's; 120 where there is neither."""
    return shutil.get_terminal_size((120, 40)).columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Columns and rows; columns whose cells are all empty are left out wherever it is shown.

    Example:
        >>> print(Table(columns=("operation", "count"), rows=[("mm", 1200), ("exp", 3)]).text(80))
        operation  count
        ---------  -----
        mm         1,200
        exp            3
    """

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    right: Collection[str] = ()
    """Columns of text that are aligned to the right, such as ``1.5 MiB``; columns of numbers always are."""
    optional: tuple[str, ...] = ()
    """Columns that a narrow terminal leaves out, the first of them first."""
    note: str = ""
    """A line under the table."""

    def text(self, width: int | None = None, most: int = MOST_ROWS) -> str:
        """The first `most` rows as text of at most `width` characters a line; None: `terminal_width`."""
        width = width or terminal_width()
        drawn = sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
        names, rows, widths = self._fitted(width, most, drawn)
        if drawn and rows:
            shown = _drawn(names, rows, self.numeric, widths, width)
        else:
            cut = [[_cut(c, w, n) for c, w, n in zip(row, widths, names, strict=True)] for row in rows]
            shown = plain(names, cut, numeric=self.numeric) if rows else ""
        parts = [shown] if shown else []
        left_out = len(self.rows) - len(rows)
        parts += [f"and {left_out:,} more rows"] if left_out else []
        hidden = [name for name in self.shown()[0] if name not in names] if rows else []
        if hidden:
            line = f"without the column{'s' * (len(hidden) > 1)} {', '.join(hidden)}: a wider terminal shows more"
            parts.append(textwrap.fill(line, width, break_on_hyphens=False))
        return "\n".join([*parts, printable(self.note)] if self.note else parts)

    @property
    def numeric(self) -> tuple[str, ...]:
        """Columns that are aligned to the right."""
        numbers = [not any(isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]
        return tuple(n for n, number in zip(self.columns, numbers, strict=True) if number or n in self.right)

    def shown(self, names: Iterable[str] | None = None) -> tuple[tuple[str, ...], list[list[str]]]:
        """The columns of `names` that are not empty, and their cells as text; None: all columns."""
        wanted = self.columns if names is None else tuple(names)
        places = [i for i, name in enumerate(self.columns) if name in wanted]
        places = [i for i in places if any(row[i] not in (None, "") for row in self.rows)]
        return tuple(self.columns[i] for i in places), [[_text(row[i]) for i in places] for row in self.rows]

    def _fitted(self, width: int, most: int, drawn: bool) -> tuple[tuple[str, ...], list[list[str]], list[int]]:
        """Columns for which there is room, their cells, and their widths: `drawn` ones wrap between words."""
        names, _ = self.shown()
        rest = [name for name in reversed(names[1:]) if name != _KEPT and name not in self.optional]
        for left_out in ("", *self.optional, *rest):
            names = tuple(name for name in names if name != left_out)
            rows = self.shown(names)[1][:most]
            widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
            if drawn:
                words = [max(map(len, " ".join(column).split())) for column in zip(names, *rows, strict=True)]
                least = [
                    size if name in (names[0], *self.numeric) else min(word, _LONGEST)
                    for size, name, word in zip(widths, names, words, strict=True)
                ]
            else:
                least = [
                    size if name in self.numeric else min(size, max(len(name), _SHORTEST.get(name, 10)))
                    for size, name in zip(widths, names, strict=True)
                ]
            room = width - 2 * (len(names) - 1 + drawn)
            if sum(least) <= room:
                break
        while sum(widths) > room and widths != least:
            widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            widths[widest] -= 1
        return names, rows, widths


def _text(cell: Cell) -> str:
    if cell is None or isinstance(cell, str):
        return printable(cell or "").replace("\n", " ").strip()
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"


def _cut(cell: str, width: int, name: str) -> str:
    if len(cell) <= width:
        return cell
    first = (width - 1) // 4 if name in _ENDS else width - 1
    return f"{cell[:first]}…{cell[len(cell) - (width - 1 - first) :]}" if name in _ENDS else cell[:first] + "…"


def plain(columns: Sequence[str], lines: Iterable[Sequence[str]], *, numeric: Collection[str] = ()) -> str:
    """Columns padded with spaces under a header, `numeric` ones to the right; no trailing spaces."""
    rows = [columns, *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [name in numeric for name in columns]
    padded = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])


def _drawn(
    columns: Sequence[str], lines: Iterable[Sequence[str]], numeric: Collection[str], widths: Sequence[int], width: int
) -> str:
    """The table as rich draws it: cells are whole, and wrapped where the terminal is narrow."""
    from rich import box, console, table, text

    drawn = table.Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, size in zip(columns, widths, strict=True):
        drawn.add_column(name, justify="right" if name in numeric else "left", overflow="fold", width=size)
    for line in lines:
        drawn.add_row(*map(text.Text, line))
    # Without colours: what is printed has no control characters (`printable`).
    paper: Any = console.Console(file=io.StringIO(), color_system=None, width=width)
    paper.print(drawn)
    return "\n".join(map(str.rstrip, paper.file.getvalue().strip("\n").splitlines()))
