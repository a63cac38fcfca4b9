"""Executables of programs: compiled, with a log line if that takes long, or read from the disk."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from xla_amp.common import config, events, progress
from xla_amp.lazy.programs import compilation_cache, pjrt, recompile_reasons
from xla_amp.lazy.programs.compile import XlaProgram
from xla_amp.lazy.programs.metrics import metrics

_log = logging.getLogger(__name__)

QUIET: float = 5.0
"""Seconds of compilation before the line is logged."""


class _Hits(threading.local):
    """Executables that this thread has read from the disk."""

    count = 0

    def note(self, event: str, **_: Any) -> None:
        self.count += event == "/jax/compilation_cache/cache_hits"


_hits = _Hits()
jax.monitoring.register_event_listener(_hits.note)


def make_ready(program: XlaProgram, arguments: Sequence[Any]) -> None:
    """Compiles a new program, or reads it from the disk; `jax.jit` keeps it.  Call with 64-bit types enabled.

    Args:
        program: called for the first time.
        arguments: of the call.

    Raises:
        StepFailedError: a lowering failed.
        jax.errors.JaxRuntimeError: XLA rejected the program.
    """
    before = _hits.count
    location, stores = events.user_location(), compilation_cache.is_on()
    with compiling(program.operations, location, stores=stores, why=lambda: recompile_reasons.why(program, location)):
        compiled = program.jitted.lower(*arguments).compile()
    program.is_ready, program.loaded = True, _hits.count > before
    metrics.programs_loaded += program.loaded
    metrics.compilations += not program.loaded
    # XLA:CPU reports zero, after 0.15 s for a GPT-2 of 12 layers.
    sizes = None if pjrt.platform() == "cpu" else compiled.memory_analysis()
    if sizes is not None:
        program.code_bytes = sizes.generated_code_size_in_bytes + sizes.host_generated_code_size_in_bytes


@contextlib.contextmanager
def compiling(operations: int, location: str, *, stores: bool, why: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Context manager around a compilation that says what a user waits for, if it takes longer than `QUIET`.

    The logger is below ``xla_amp``: its level silences the two lines, and so does ``XLA_AMP_PROGRESS=off``.  Python
    writes them to stderr unless the program configures logging.

    Args:
        operations: count of operations in the step.
        location: ``file:line`` of the user's that waits, may be empty.
        stores: whether the result is kept on the disk.
        why: what differs from the programs that the line has compiled before; asked only if the line is logged.
    """
    text = f"{operations:,} operations{location and ', from '}{location}{'; kept for the next run' if stores else ''}"
    shown = config.shows_progress() and _log.isEnabledFor(logging.WARNING)
    timer = threading.Timer(QUIET, lambda: _say(f"compiling {text}{(reason := why()) and '; again: '}{reason}"))
    timer.daemon = True
    begin = time.monotonic()
    if shown:
        try:
            timer.start()
        except RuntimeError:  # the interpreter ends, when Python 3.12 starts no thread
            shown = False
    try:
        yield
    finally:
        timer.cancel()
        seconds = time.monotonic() - begin
        if shown and seconds > QUIET:
            timer.join()
            _say(f"compiled {operations:,} operations in {seconds:.1f} s")


def _say(text: str) -> None:
    with progress.above_bars():
        _log.warning(text)
