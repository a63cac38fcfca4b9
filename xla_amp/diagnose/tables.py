"""Tables for the terminal, with rich where it is installed and without it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def plain(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Columns padded with spaces under a header; no trailing spaces."""
    rows = [columns, *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])


def rich(columns: Sequence[str], lines: Iterable[Sequence[str]], caption: str | None = None) -> Any:
    """A `rich.table.Table`.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, caption=caption, caption_justify="left")
    for line in lines:
        table.add_row(*map(Text, line))
    return table
