"""Executables of programs: compiled, with a log line if that takes long, or read from the disk."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from xla_amp.common import config, events
from xla_amp.lazy import private_api
from xla_amp.lazy.programs import compilation_cache, pjrt
from xla_amp.lazy.programs.compile import XlaProgram
from xla_amp.lazy.programs.metrics import metrics

_HIT = "/jax/compilation_cache/cache_hits"


class _Launch:
    """Calls an executable, or the jitted program for arguments or settings that the executable is not for.

    `jax.jit` would compile again for an array of another memory layout, or under another
    ``jax.default_matmul_precision``; an executable raises, or does not notice.
    """

    __slots__ = ("_compiled", "_context", "_jitted")

    def __init__(self, compiled: jax.stages.Compiled, jitted: Any) -> None:
        self._compiled = compiled
        self._jitted = jitted
        self._context = private_api.trace_context()

    def __call__(self, *arguments: Any) -> Any:
        if private_api.trace_context() == self._context:
            try:
                return self._compiled(*arguments)
            except (TypeError, ValueError):  # raised before anything runs: another layout or sharding
                pass
        return self._jitted(*arguments)


class _Hits(threading.local):
    """Executables that this thread has read from the disk."""

    count = 0

    def note(self, event: str, **_: Any) -> None:
        self.count += event == _HIT


_hits = _Hits()
jax.monitoring.register_event_listener(_hits.note)


def make_ready(program: XlaProgram, arguments: Sequence[Any]) -> None:
    """Gives a new program its executable; call with 64-bit types enabled.

    Args:
        program: whose `call` becomes the executable's.
        arguments: of the first call.

    Raises:
        StepFailedError: a lowering failed.
        jax.errors.JaxRuntimeError: XLA rejected the program.
    """
    stores = compilation_cache.is_on()
    with compiling(program.operations, events.user_location(), stores=stores):
        lowered = program.jitted.lower(*arguments)
        before = _hits.count
        compiled = lowered.compile()
    program.loaded = _hits.count > before
    metrics.programs_loaded += program.loaded
    metrics.compilations += not program.loaded
    program.code_bytes = _code_bytes(compiled)
    program.call = _Launch(compiled, program.jitted)


def first_call(program: XlaProgram, *arguments: Any) -> Any:
    """`make_ready`, and the call."""
    make_ready(program, arguments)
    return program.call(*arguments)


def _code_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of machine code, 0 if XLA does not report them."""
    if pjrt.platform() == "cpu":
        return 0  # XLA:CPU reports zero, after 0.15 s for a GPT-2 of 12 layers
    executable: Any = compiled.runtime_executable()
    try:
        stats = executable.get_compiled_memory_stats()
    except jax.errors.JaxRuntimeError:
        return 0
    return int(stats.generated_code_size_in_bytes + stats.host_generated_code_size_in_bytes)


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
