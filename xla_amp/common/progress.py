"""Progress of a long call on standard error: a bar on a terminal, otherwise a line every 15 seconds.

What computes calls `tell`; who shows it wraps the call in `shown`.  ``XLA_AMP_PROGRESS=off`` shows nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

from xla_amp.common import config

EVERY: float = 15.0
"""Seconds between two lines where there is no bar; a shorter call prints none."""
QUIET: float = 1.0
"""Seconds before the bar is shown."""


@dataclasses.dataclass(slots=True)
class _State:
    title: str
    begin: float
    what: str = "begins"
    done: int = 0
    total: int = 0


_shown: contextvars.ContextVar[_State | None] = contextvars.ContextVar("xla_amp_progress", default=None)


def tell(what: str, done: int = 0, total: int = 0) -> None:
    """Tells what begins now, how many of its parts are done, and how many there are (0: unknown)."""
    state = _shown.get()
    if state is not None:
        state.what, state.done, state.total = what, done, total


def wanted(stream: TextIO | None) -> bool:
    """Whether to show progress on `stream`: a terminal, or as ``XLA_AMP_PROGRESS`` demands."""
    asked = config.progress()
    if asked != "auto" or stream is None:
        return asked == "on" and stream is not None
    return stream.isatty()


@contextlib.contextmanager
def shown(title: str, *, lines: bool = False, first: float | None = None) -> Iterator[None]:
    """Shows what is told while the body runs.

    Args:
        title: opens each line.
        lines: whether to print lines, too, where standard error is no terminal.
        first: seconds before the first line; None is `EVERY`.
    """
    stream = sys.stderr
    bar = _bar() if wanted(stream) and stream.isatty() else None
    if bar is None and not wanted(stream) and (not lines or config.progress() == "off"):
        yield
        return
    state, done = _State(title, time.monotonic()), threading.Event()
    run = (
        (_show_bar, (bar, state, done))
        if bar is not None
        else (_show_lines, (stream, state, done, EVERY if first is None else min(first, EVERY)))
    )
    thread = threading.Thread(target=run[0], args=run[1], daemon=True, name="xla_amp progress")
    thread.start()
    token = _shown.set(state)
    try:
        yield
    finally:
        _shown.reset(token)
        done.set()
        thread.join()  # the bar leaves the terminal before a report is printed


def _show_lines(stream: TextIO, state: _State, done: threading.Event, first: float) -> None:
    wait = first
    while not done.wait(wait):
        wait = EVERY
        share = f", {state.done} of {state.total}" if state.total else ""
        seconds = time.monotonic() - state.begin
        print(f"{state.title}: {state.what}{share} ({seconds:.0f} s)", file=stream, flush=True)


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
    if done.wait(QUIET):
        return
    with bar:
        task = bar.add_task(state.title, total=None)
        while not done.wait(0.2):
            text = f"{state.title}: {state.what}"
            bar.update(task, description=text, completed=state.done, total=state.total or None)
