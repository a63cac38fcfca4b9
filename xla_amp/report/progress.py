"""Progress of a long report on the terminal, with rich where it is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from xla_amp import config


@contextlib.contextmanager
def counting(title: str) -> Iterator[Callable[[int, str], None]]:
    """Gives ``show(number, text)``, which updates a line on stderr.

    It is shown if stderr is a terminal, or as ``XLA_AMP_PROGRESS`` demands, and rich is installed.
    """
    asked = config.progress()
    wanted = sys.stderr is not None and (asked == "on" or (asked == "auto" and sys.stderr.isatty()))
    try:
        from rich import console, progress
    except ImportError:
        wanted = False
    if not wanted:
        yield lambda number, text: None
        return
    columns = (progress.SpinnerColumn(), "{task.description}", progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda number, text: bar.update(task, description=f"{title}: {number} measured, now {text}")
