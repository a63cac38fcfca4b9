"""A log line for compilations that take long."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

from xla_amp.common import config

_log = logging.getLogger(__name__)

QUIET: float = 5.0
"""Seconds of compilation before the line is logged."""


@contextlib.contextmanager
def compiling(operations: int, location: str, *, stores: bool) -> Iterator[None]:
    """Context manager around a compilation that says what a user waits for, if it takes longer than `QUIET`.

    The logger is below ``xla_amp``: its level silences the two lines, and so does ``XLA_AMP_PROGRESS=off``.  Python
    writes them to stderr unless the program configures logging.

    Args:
        operations: count of operations in the step.
        location: ``file:line`` of the user's that waits, may be empty.
        stores: whether the result is kept on the disk.
    """
    begin = time.monotonic()
    ended = threading.Event()
    text = f"{operations:,} operations{location and ', from '}{location}"
    kept = "; kept for the next run" if stores else ""
    shown = []

    def watch() -> None:
        if not ended.wait(QUIET):
            shown.append(True)
            _say(f"compiling {text}{kept}")

    watcher = None
    if config.progress() != "off" and _log.isEnabledFor(logging.WARNING):
        watcher = threading.Thread(target=watch, daemon=True, name="xla_amp progress")
        watcher.start()
    try:
        yield
    finally:
        ended.set()
        if watcher is not None:
            watcher.join()
        if shown:
            _say(f"compiled {operations:,} operations in {time.monotonic() - begin:.1f} s")


def _say(text: str) -> None:
    """Logs a separate line: a progress bar of tqdm is drawn again below it."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with tqdm.external_write_mode(file=sys.stderr) if tqdm is not None else contextlib.nullcontext():
        _log.warning(text)
