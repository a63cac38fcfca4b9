"""Executables of programs: compiled, or read from JAX's cache on the disk (`compilation_cache`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax

from xla_amp.common import events
from xla_amp.lazy import private_api
from xla_amp.lazy.programs import compilation_cache, pjrt, progress
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
    with progress.compiling(program.operations, events.user_location(), stores=stores):
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
