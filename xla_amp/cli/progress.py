"""Progress of a long command on standard error: a bar on a terminal, otherwise a line every 15 seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, TextIO

from xla_amp import config
from xla_amp.stablehlo import progress

EVERY: float = 15.0
"""Seconds between two lines where there is no terminal; a shorter command prints none."""
_QUIET: Final = 1.0
"""Seconds before the bar is shown."""


@contextlib.contextmanager
def shown(command: str) -> Iterator[None]:
    """Shows what `xla_amp.stablehlo` tells while the body runs; ``XLA_AMP_PROGRESS=off`` shows nothing."""
    asked, stream = config.progress(), sys.stderr
    if asked == "off":
        yield
        return
    state = _State(command)
    done = threading.Event()
    bar = _bar() if asked == "auto" and stream.isatty() else None
    run = (_show_bar, (bar, state, done)) if bar is not None else (_show_lines, (stream, state, done))
    thread = threading.Thread(target=run[0], args=run[1], daemon=True, name="xla_amp progress")
    thread.start()
    try:
        with progress.watched(state.tell):
            yield
    finally:
        done.set()
        thread.join()  # the bar leaves the terminal before the report is printed


class _State:
    def __init__(self, command: str) -> None:
        self.command, self.begin = command, time.monotonic()
        self.now: tuple[str, int, int] = ("reading", 0, 0)

    def tell(self, what: str, done: int, total: int) -> None:
        self.now = (what, done, total)


def _show_lines(stream: TextIO, state: _State, done: threading.Event) -> None:
    while not done.wait(EVERY):
        what, part, total = state.now
        share = f", {part} of {total}" if total else ""
        seconds = time.monotonic() - state.begin
        print(f"xla-amp {state.command}: {what}{share} ({seconds:.0f} s)", file=stream, flush=True)


def _bar() -> Any:
    """A bar of rich, or None where it is not installed."""
    try:
        from rich import progress as bars
        from rich.console import Console
    except ImportError:
        return None
    return bars.Progress(
        bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip


def _show_bar(bar: Any, state: _State, done: threading.Event) -> None:
    if done.wait(_QUIET):
        return
    with bar:
        task = bar.add_task(state.command, total=None)
        while not done.wait(0.2):
            what, part, total = state.now
            bar.update(task, description=f"{state.command}: {what}", completed=part, total=total or None)
