"""Executables of programs: read from the disk (`disk`), or compiled and stored there.

A stored executable needs neither JAX's tracing nor its lowering: its name is the program's content (`content`).
Of a program that several processes run together each stores a separate executable, on a CPU.  Other platforms share the
work of a compilation between the processes, which must not begin in some of them only: JAX's cache is used.
"""

from __future__ import annotations

import functools
import logging
import pickle
import time
from collections.abc import Sequence
from typing import Any, Final

import jax
from jax.experimental import serialize_executable

from xla_amp.common import events
from xla_amp.lazy import private_api
from xla_amp.lazy.programs import compilation_cache, content, disk, mesh, pjrt, progress
from xla_amp.lazy.programs.compile import XlaProgram
from xla_amp.lazy.programs.metrics import metrics

_log = logging.getLogger(__name__)

_LAPACK: Final = b"lapack_"
"""In executables that call LAPACK, whose functions JAX looks up while it lowers."""
_ahead: disk.Ahead | None = None


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


def start() -> None:
    """Begins to load what the same command used last time; call when the device starts."""
    global _ahead
    folder = compilation_cache.folder()
    if folder is not None:
        _ahead = disk.Ahead(folder, content.command, functools.partial(_load, folder, devices=[pjrt.jax_device()]))


def make_ready(program: XlaProgram, arguments: Sequence[Any]) -> None:
    """Gives a new program its executable; call with 64-bit types enabled.

    Args:
        program: whose `call` becomes the executable's.
        arguments: of the first call.

    Raises:
        StepFailedError: a lowering failed.
        jax.errors.JaxRuntimeError: XLA rejected the program.
    """
    folder = compilation_cache.folder()
    name = _name(program, arguments) if folder is not None else None
    begun = _ahead if _ahead is not None and _ahead.folder is folder and mesh.active is None else None
    compiled = None
    if folder is not None and name is not None:
        compiled = (begun and begun.take(name)) or _load(folder, name, _devices())
        metrics.programs_loaded += compiled is not None
    program.loaded = compiled is not None
    if compiled is None:
        with progress.compiling(program.operations, events.user_location(), stores=name is not None):
            begin = time.monotonic()
            compiled = program.jitted.lower(*arguments).compile()
            seconds = time.monotonic() - begin
        metrics.compilations += 1
        if folder is not None and name is not None and seconds >= folder.least_seconds:
            _store(folder, name, compiled)
    if begun is not None and name is not None:
        begun.note(name)
    program.code_bytes = _code_bytes(compiled)
    program.call = _Launch(compiled, program.jitted)


def first_call(program: XlaProgram, *arguments: Any) -> Any:
    """`make_ready`, and the call."""
    make_ready(program, arguments)
    return program.call(*arguments)


def _name(program: XlaProgram, arguments: Sequence[Any]) -> str | None:
    try:
        if pjrt.platform() != "cpu" and (mesh.replicas or mesh.spans_processes()):
            compilation_cache.start_jax_cache(named=True)
            raise content.NoDescriptionError("collectives between processes")
        return content.digest(program, arguments)
    except content.NoDescriptionError as error:
        _log.info("a program is not stored on the disk: it contains %s", error)
        metrics.programs_not_stored += 1
        return None


def _load(folder: disk.Folder, name: str, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    data = folder.read(name)
    if data is None:
        return None
    try:
        if _LAPACK in data:
            private_api.prepare_lapack()
        with private_api.x64():
            payload, takes, returns = pickle.loads(data)
            compiled: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                payload, takes, returns, backend=devices[0].client, execution_devices=devices
            )
    except Exception as error:  # whatever the pickle, JAX or XLA raise for what they cannot read
        folder.remove(name, f"it cannot be loaded ({type(error).__name__}: {error})")
        return None
    return compiled


def _store(folder: disk.Folder, name: str, compiled: jax.stages.Compiled) -> None:
    executable: Any = compiled.runtime_executable()
    here = [device for device in _devices() if device.process_index == jax.process_index()]
    if list(executable.local_devices()) != here:
        metrics.programs_not_stored += 1  # it would be loaded for other devices
        return
    try:
        data = pickle.dumps(serialize_executable.serialize(compiled))
    except Exception as error:  # JAX has no common class for what a backend cannot serialize
        _log.info("a program is not stored on the disk, only in JAX's cache: %s: %s", type(error).__name__, error)
        metrics.programs_not_stored += 1
        compilation_cache.start_jax_cache()
        return
    folder.write(name, data)


def _devices() -> list[jax.Device]:
    return [pjrt.jax_device()] if mesh.active is None else list(mesh.active.devices.flat)


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
