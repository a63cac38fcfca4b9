"""Progress line on the terminal during long compilations."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from xla_amp.progress import wanted

_log = logging.getLogger(__name__)

QUIET: float = 3.0
"""Seconds of compilation before the line is shown."""
_BEAT = 1.0
"""Seconds between two updates of the line."""


@contextlib.contextmanager
def compiling(operations: int, platform: str) -> Iterator[None]:
    """Context manager around a compilation: shows its duration on stderr and logs it at level INFO.

    The line is shown if stderr is a terminal, or as ``XLA_AMP_PROGRESS`` demands.

    Args:
        operations: count of operations in the step.
        platform: XLA platform of the program.
    """
    stream = sys.stderr
    begin = time.monotonic()
    done = threading.Event()
    text = f"xla_amp: compiling a step of {operations} operations for {platform}"
    if wanted(stream):
        threading.Thread(target=_show, args=(stream, text, begin, done), daemon=True, name="xla_amp progress").start()
    try:
        yield
    finally:
        done.set()
        _log.info("%s took %.1f s", text.removeprefix("xla_amp: "), time.monotonic() - begin)


def _show(stream: TextIO, text: str, begin: float, done: threading.Event) -> None:
    shown = False
    wait = QUIET
    while not done.wait(wait):
        wait, shown = _BEAT, True
        print(f"\r{text}: {time.monotonic() - begin:.0f} s", end="", file=stream, flush=True)
    if shown:
        print(f"\r{text}: {time.monotonic() - begin:.0f} s, done", file=stream, flush=True)
