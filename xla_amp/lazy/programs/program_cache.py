"""Caches of compiled programs, bounded by the bytes that all of them take; the least recently run goes first.

XLA:GPU and XLA:TPU report the size of an executable's code.  XLA:CPU reports zero, and keeps much more than its code:
for a small MLP's training step the process grew by 3.9, 6.9 and 19.7 MiB a program whose serialized executable had
0.10, 0.27 and 0.90 MB.  Serializing an executable to measure it took 0.7 s for a network of 12 convolutions, so the
size is estimated from the count of operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections import OrderedDict

from xla_amp.common import config
from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph import trace as graph
from xla_amp.lazy.programs.compile import Key, XlaProgram, alive
from xla_amp.lazy.programs.metrics import metrics

BASE = 1_400_000
"""Bytes of a program that do not depend on its size: jaxprs, JAX's cache entries, XLA's tables."""
PER_OPERATION = 80_000
"""Bytes for each recorded operation, in the same programs (LLVM's objects, the HLO module, thunks); where XLA does not
report the size of the code."""
_TRIM = 64 << 20
"""Bytes of dropped programs after which the C library is asked to return free memory to the system."""
_LARGE = 16 << 20
"""Bytes of a program whose compilation leaves much free memory: it is returned, too."""
_TRACES = 2048
"""Traces that JAX may keep, of 8 KiB each; beyond that `private_api.drop_traces` drops those of JAX's own functions."""
_LEAST_INSTRUCTIONS = 1024
"""Instructions below which unused ones are not looked for."""

Cache = OrderedDict[Key, XlaProgram]

_caches: list[Cache] = []
_clock = itertools.count(1)
_instruction_limit = _LEAST_INSTRUCTIONS
_untrimmed = 0


def new_cache() -> Cache:
    """A cache whose programs count; its newest item is the program that ran last."""
    cache: Cache = OrderedDict()
    _caches.append(cache)
    return cache


def add(cache: Cache, key: Key, program: XlaProgram) -> None:
    """Stores a program after its first run, and drops programs beyond the limit."""
    program.size = BASE + (program.code_bytes or PER_OPERATION * program.operations)
    program.used = next(_clock)
    cache[key] = program
    _drop_beyond_limit()
    if program.size >= _LARGE and not program.loaded:
        _trim()
    private_api.drop_traces(_TRACES)
    _count()


def touch(program: XlaProgram) -> None:
    """Marks a program as the most recently run."""
    program.used = next(_clock)


def clear(cache: Cache) -> None:
    """Empties a cache."""
    cache.clear()
    _count()


def _count() -> None:
    kept = [program for cache in _caches for program in cache.values()]
    metrics.programs_kept = len(kept)
    metrics.program_bytes = sum(program.size for program in kept)


def _drop_beyond_limit() -> None:
    global _untrimmed
    limit, total, dropped = config.program_memory(), 0, 0
    rows = [(program, cache, key) for cache in _caches for key, program in cache.items()]
    for position, (program, cache, key) in enumerate(sorted(rows, key=lambda row: row[0].used, reverse=True)):
        total += program.size
        if total <= limit or position == 0:
            continue
        del cache[key]
        dropped += 1
        _untrimmed += program.size
    if not dropped:
        return
    metrics.programs_dropped += dropped
    _drop_instructions()
    if _untrimmed >= _TRIM:
        _trim()


def _drop_instructions() -> None:
    """Drops instructions of dropped programs, once there are many; the kernels make them again when needed."""
    global _instruction_limit
    if len(graph.instructions) < _instruction_limit:
        return
    used = {number for program in alive for number in program.instructions}
    graph.forget_unused(used | graph.recorded())
    _instruction_limit = max(_LEAST_INSTRUCTIONS, 2 * len(graph.instructions))


def _trim() -> None:
    # XLA compiles on several threads, so what it frees is spread over many of malloc's arenas and stays there: 400 MiB
    # after the step of a GPT-2 of two layers.
    global _untrimmed
    _untrimmed = 0
    with contextlib.suppress(AttributeError, OSError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)
