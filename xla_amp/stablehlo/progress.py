"""What a long call is doing: the calls tell a watcher, which the command line sets.

>>> told = []
>>> with watched(lambda what, done, total: told.append((what, done, total))):
...     step("measuring", 1, 3)
>>> told
[('measuring', 1, 3)]
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeAlias

Watcher: TypeAlias = Callable[[str, int, int], None]
"""Receives what begins now, how many of its parts are done, and how many there are; 0 if nobody knows."""

_watcher: contextvars.ContextVar[Watcher | None] = contextvars.ContextVar("xla_amp_progress", default=None)


def step(what: str, done: int = 0, total: int = 0) -> None:
    """Tells the watcher, if there is one, what begins now."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(what, done, total)


@contextlib.contextmanager
def watched(by: Watcher) -> Iterator[None]:
    """Sets the watcher for the calls inside."""
    token = _watcher.set(by)
    try:
        yield
    finally:
        _watcher.reset(token)
