"""Progress of a long call on standard error: a bar on a terminal where rich is installed, otherwise a line every 15 s.

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
from contextlib import AbstractContextManager
from typing import Any, TextIO

from xla_amp.common import config

EVERY: float = 15.0
"""Seconds between two lines; a shorter call prints none."""
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


@contextlib.contextmanager
def shown(title: str, *, first: float | None = None) -> Iterator[None]:
    """Shows what is told while the body runs.

    Args:
        title: opens each line.
        first: seconds before the first line, at most `EVERY`; None is `EVERY`.
    """
    if not config.shows_progress():
        yield
        return
    state, done, stream = _State(title, time.monotonic()), threading.Event(), sys.stderr
    wait = EVERY if first is None else min(first, EVERY)
    bar = _bar() if stream is not None and stream.isatty() else None
    show, what = (_show, stream) if bar is None else (_show_bar, bar)
    thread = threading.Thread(target=show, args=(what, state, done, wait), daemon=True, name="xla_amp progress")
    thread.start()
    token = _shown.set(state)
    try:
        yield
    finally:
        _shown.reset(token)
        done.set()
        thread.join()  # the bar leaves the terminal before a report is printed


def above_bars() -> AbstractContextManager[object]:
    """While a line is printed to standard error: bars of the user's tqdm are cleared, and drawn again below it."""
    tqdm: Any = sys.modules.get("tqdm")
    return contextlib.nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=sys.stderr)


def _show(stream: TextIO | None, state: _State, done: threading.Event, wait: float) -> None:
    while not done.wait(wait):
        wait = EVERY
        share = f", {state.done} of {state.total}" if state.total else ""
        seconds = time.monotonic() - state.begin
        with above_bars():
            print(f"{state.title}: {state.what}{share} ({seconds:.0f} s)", file=stream, flush=True)


def _bar() -> Any:
    """A bar of rich, or None where it is not installed."""
    try:
        from rich import console, progress
    except ImportError:
        return None
    columns = (progress.SpinnerColumn(), "{task.description}", progress.BarColumn(), progress.TimeElapsedColumn())
    return progress.Progress(*columns, console=console.Console(stderr=True), transient=True)


def _show_bar(bar: Any, state: _State, done: threading.Event, wait: float) -> None:
    if done.wait(min(wait, QUIET)):
        return
    with bar:
        task = bar.add_task(state.title, total=None)
        while not done.wait(0.2):
            bar.update(
                task, description=f"{state.title}: {state.what}", completed=state.done, total=state.total or None
            )
