"""The newest statistics as a table for the terminal, once or kept up to date."""

from __future__ import annotations

from typing import Any

from xla_amp import tables
from xla_amp.errors import MissingLibraryError, printable
from xla_amp.report import terminal
from xla_amp.tools.monitor import history_report
from xla_amp.tools.monitor.history import History, StepRecord

COLUMNS = ("layer", "kind", "amax", "rms", "headroom", "underflow", "inf", "NaN", "update ratio")
_NUMBERS = COLUMNS[2:]
_EMPTY = ("", "0.0%")
"""Cells that do not need a column if it has no others: the names of layers need the width."""


def lines(record: StepRecord) -> list[list[str]]:
    """The rows of `COLUMNS`, least headroom first."""
    rows = sorted(record.statistics.items(), key=lambda item: item[1].headroom)
    return [
        [printable(key.layer) or "(model)", key.kind, f"{row.amax:.3g}", f"{row.rms:.3g}", f"{row.headroom:.1f}",
         f"{row.underflow:.1%}", f"{row.inf:.1%}", f"{row.nan:.1%}",
         "" if row.update_ratio is None else f"{row.update_ratio:.1e}"]
        for key, row in rows
    ]  # fmt: skip


def text(history: History) -> str:
    """Advice, and the newest statistics with their course."""
    return terminal.text(history_report.document(history))


class Live:
    """Sink that keeps a table of the newest sampled step on the terminal, with ``rich``.

    Raises:
        MissingLibraryError: rich is not installed.
    """

    def __init__(self, most: int = 25) -> None:
        try:
            from rich.live import Live as Display
        except ImportError:
            raise MissingLibraryError("a live table: rich is not installed: pip install 'xla-amp[cli]'") from None

        self._most = most
        self._sampled: StepRecord | None = None
        self._display: Any = Display(refresh_per_second=4)
        self._display.start()

    def __call__(self, record: StepRecord) -> None:
        if record.statistics:
            self._sampled = record
        rows = [] if self._sampled is None else lines(self._sampled)[: self._most]
        kept = [index for index in range(len(COLUMNS)) if any(row[index] not in _EMPTY for row in rows)]
        rows, names = [[row[index] for index in kept] for row in rows], [COLUMNS[index] for index in kept]
        self._display.update(tables.rich(names, rows, history_report.headline(record), numeric=_NUMBERS))

    def close(self) -> None:
        """Leaves the last table and ends."""
        self._display.stop()
