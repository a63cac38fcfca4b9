"""Progress of a long call on standard error: a line every 15 seconds.

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
from typing import TextIO

from xla_amp.common import config

EVERY: float = 15.0
"""Seconds between two lines; a shorter call prints none."""


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
    state, done = _State(title, time.monotonic()), threading.Event()
    wait = EVERY if first is None else min(first, EVERY)
    thread = threading.Thread(target=_show, args=(sys.stderr, state, done, wait), daemon=True, name="xla_amp progress")
    thread.start()
    token = _shown.set(state)
    try:
        yield
    finally:
        _shown.reset(token)
        done.set()
        thread.join()


def _show(stream: TextIO | None, state: _State, done: threading.Event, wait: float) -> None:
    while not done.wait(wait):
        wait = EVERY
        share = f", {state.done} of {state.total}" if state.total else ""
        seconds = time.monotonic() - state.begin
        print(f"{state.title}: {state.what}{share} ({seconds:.0f} s)", file=stream, flush=True)
