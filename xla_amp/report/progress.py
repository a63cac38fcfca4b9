"""Progress on the terminal: when to show it, and a line for a long report, with rich where it is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from xla_amp import config


def wanted(stream: TextIO | None) -> bool:
    """Whether to show progress on `stream`: a terminal, or as ``XLA_AMP_PROGRESS`` demands."""
    asked = config.progress()
    if asked != "auto" or stream is None:
        return asked == "on" and stream is not None
    return stream.isatty()


@contextlib.contextmanager
def counting(title: str) -> Iterator[Callable[[int, str], None]]:
    """Gives ``show(number, text)``, which updates a line on stderr.

    It is shown if stderr is a terminal, or as ``XLA_AMP_PROGRESS`` demands, and rich is installed.
    """
    show = wanted(sys.stderr)
    try:
        from rich import console, progress
    except ImportError:
        show = False
    if not show:
        yield lambda number, text: None
        return
    columns = (progress.SpinnerColumn(), "{task.description}", progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda number, text: bar.update(task, description=f"{title}: {number} measured, now {text}")
