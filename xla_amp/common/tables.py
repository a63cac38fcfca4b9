"""Format tables for the terminal, with or without rich."""

from __future__ import annotations

import importlib.util
import io
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any


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


def rich(columns: Sequence[str], lines: Iterable[Sequence[str]], *, numeric: Collection[str] = ()) -> Any:
    """A `rich.table.Table`.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in columns:
        table.add_column(name, justify="right" if name in numeric else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def has_rich() -> bool:
    """Whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


def for_terminal(columns: Sequence[str], lines: Iterable[Sequence[str]], *, numeric: Collection[str] = ()) -> str:
    """`rich` if standard output is a terminal and rich is installed, otherwise `plain`, without escape codes."""
    lines = list(lines)
    if not sys.stdout.isatty():
        return plain(columns, lines, numeric=numeric)
    try:
        from rich.console import Console
    except ImportError:
        return plain(columns, lines, numeric=numeric)
    console = Console(file=io.StringIO(), force_terminal=True, width=shutil.get_terminal_size().columns)
    console.print(rich(columns, lines, numeric=numeric))
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    return shown.rstrip("\n")
