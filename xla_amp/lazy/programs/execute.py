"""Flush the trace: run it as one executable, asynchronously, and store the results in the live buffers."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from xla_amp.common import events
from xla_amp.errors import KernelWarning, StepFailedError, XlaAmpError
from xla_amp.lazy import dtypes, private_api
from xla_amp.lazy.graph.trace import Buffer, Poisoned, trace
from xla_amp.lazy.programs import (
    dynamic_ints,
    executables,
    memory_layout,
    mesh,
    pjrt,
    program_cache,
    recompile_reasons,
)
from xla_amp.lazy.programs.compile import NO_SHARDINGS, Key, Shardings, XlaProgram, build
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.torch_integration import forks, generator
from xla_amp.lowering import forms

if TYPE_CHECKING:
    from xla_amp.lazy.steps import failed_step

_programs = program_cache.new_cache()
_pending: dict[Callable[[], list[Any]], object] = {}
"""Functions that return the results, as far as they are referenced, of the last programs that were not waited for,
each with a mark of its dispatch.  XLA:CPU runs those of several threads side by side."""
_MOST_PENDING: Final = 64


@events.Point
def flush_nears() -> None:
    """Before a flush looks which values are referenced; may reference more of them."""


@events.Point
def flush_begins(parameters: list[Buffer], held: list[bool]) -> None:
    """Before the trace is read; may change its numbers.  `held` says which parameters have a storage."""


@events.Point
def program_admitted(program: XlaProgram, arguments: Sequence[Any]) -> None:
    """Before the first run of each program, with its inputs; raises to reject it."""


@events.Point
def flush_ends(program: XlaProgram, code: tuple[int, ...], targets: list[Buffer]) -> None:
    """After `program` was dispatched, before the trace is cleared; `targets` get its outputs."""


@events.Point
def program_ran() -> None:
    """After the results of a program were stored."""


def flush(spent: tuple[int, ...] | None = None) -> None:
    """Runs the trace asynchronously, and starts an empty one; does nothing if nothing was recorded.

    Args:
        spent: parameters whose arrays the program takes, which nothing else holds; None finds them.

    Raises:
        StepFailedError: an operation could not be lowered, or XLA rejected the program.  New tensors that do not depend
            on it are computed.  Tensors that the trace overwrites get their new values if none of those depends on it;
            otherwise all of them keep the values from before the first operation of the trace.
    """
    forks.check()
    with trace.lock:
        if trace.code:
            _run(spent)


def run_at_once(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` of an operation, followed by running what it recorded and waiting for it: errors belong to its call."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        _finish()
        return result

    return run


def sync(wait: bool = False) -> None:
    """Ends the step: runs what was recorded as one executable.

    Args:
        wait: also wait until the device has finished (one host sync).
    """
    flush()
    if wait:
        metrics.host_syncs += 1
        recompile_reasons.host_waits()
        _finish()


def _finish() -> None:
    """Runs the trace, and waits for all programs."""
    with trace.lock:
        flush()
        programs = dict(_pending)
        values = [value for results in programs for value in results()]
    failure: Exception | None = None
    for value in values:
        try:
            _wait_for(value)
        except Exception as error:
            failure = failure or error
    with trace.lock:
        for results, mark in programs.items():
            if _pending.get(results) is mark:  # otherwise it was dispatched again meanwhile
                del _pending[results]
    if failure is not None and mesh.ended.listeners:
        raise StepFailedError(f"{failure}{mesh.ended_peers()}") from failure
    if failure is not None:
        raise failure


def _wait_for(value: Any) -> None:
    if not isinstance(value, jax.Array) or value.is_deleted():
        return
    try:
        value.block_until_ready()
    except RuntimeError:
        if not value.is_deleted():  # otherwise another thread has given it to its next program
            raise


def programs() -> list[XlaProgram]:
    """The programs built so far, least recently run first."""
    return list(_programs.values())


def clear_programs() -> None:
    """Drops all compiled programs; the next steps are compiled again."""
    with trace.lock:
        program_cache.clear(_programs)


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Flush:
    """One run of the trace: what it reads and writes, its program, and what that returned."""

    parameters: list[Buffer]
    arrays: list[Any]
    """Of the parameters."""
    held: list[bool]
    """Which parameters a storage has, so that their buffers can still be read."""
    targets: list[Buffer]
    """Buffers that get a value: overwritten parameters first and in order, then what is computed.

    JAX pairs the n-th donated input of a spec with its n-th output, so that a weight's new value is written to the old
    one's memory.
    """
    overwritten: int
    """How many of the targets are overwritten parameters."""
    key: Key | None = None
    program: XlaProgram | None = None
    is_new: bool = False
    """Whether the program was built for this run."""
    repeats: bool = False
    """Whether the flush before ran the same program."""
    outputs: list[Any] = dataclasses.field(default_factory=list)


def _run(spent: tuple[int, ...] | None) -> None:
    run = _prepare()
    try:
        _choose(run, spent)
        with private_api.x64():
            _launch(run)
    except BaseException as error:
        reason = _abandon(run, error)
        if reason is error:
            raise
        raise reason from error
    _commit(run)


def _prepare() -> _Flush:
    """Reads the trace; no value changes."""
    flush_nears()
    if mesh.active is not None:
        mesh.move_to_mesh(trace.parameters)
    parameters, arrays = trace.parameters, [buffer.array for buffer in trace.parameters]
    held = [count > ALONE for count in reference_counts(parameters)]
    computed = [buffer for reference in trace.computed if (buffer := reference()) is not None and buffer.number >= 0]
    overwritten = [
        buffer
        for buffer, number, alive in zip(parameters, trace.parameter_numbers, held, strict=True)
        if buffer.number != number and alive
    ]
    flush_begins(parameters, held)
    targets = overwritten + computed
    return _Flush(parameters=parameters, arrays=arrays, held=held, targets=targets, overwritten=len(overwritten))


def _choose(run: _Flush, spent: tuple[int, ...] | None) -> None:
    """Finds the program of the trace, None if it has to be built."""
    key = _key(run, _spent(run) if spent is None else spent)
    # Most steps repeat the step before, and comparing thousands of numbers costs less than hashing them.
    before, program = next(reversed(_programs.items()), (None, None))
    run.repeats = before == key
    if not run.repeats:
        program = _programs.get(key)
        if program is None and not flush_begins.listeners and dynamic_ints.replace():
            key = dataclasses.replace(key, code=tuple(trace.code))
            program = _programs.get(key)
        if program is None and spent is None and not flush_begins.listeners:
            program = _donating_more(run, key)
            key = key if program is None else program.key
    run.key, run.program, run.is_new = key, program, program is None


_FEW: Final = 64
"""Bytes that a program may leave where it could have taken them."""


def _donating_more(run: _Flush, key: Key) -> XlaProgram | None:
    """A program that differs only in the arrays that it takes: copies for it cost less than compiling another."""
    for other, program in reversed(_programs.items()):
        if dataclasses.replace(other, spent=key.spent) != key:
            continue
        left = [run.parameters[index].spec for index in set(key.spent).difference(other.spent)]
        if sum(each.size * each.numpy_dtype.itemsize for each in left) <= _FEW and len(other.spent) > len(left):
            for index in set(other.spent).difference(key.spent):
                run.arrays[index] = memory_layout.copy(run.arrays[index])
            return program
    return None


def _key(run: _Flush, spent: tuple[int, ...]) -> Key:
    parameters = run.parameters
    shardings = NO_SHARDINGS
    if mesh.is_partitioned():
        shardings = Shardings(
            tuple(map(mesh.placement_of, parameters)), mesh.output_shardings(run.targets, run.overwritten)
        )
    wanted = tuple(buffer.number for buffer in run.targets)
    return Key(code=tuple(trace.code), wanted=wanted, spent=spent, shardings=shardings)


def _launch(run: _Flush) -> None:
    """Dispatches the program, which is built and compiled if it is new; call with 64-bit types enabled."""
    floats, ints, streams = _numbers()
    program = run.program = run.program or _build(run, streams)
    for parameter, _, order in program.input_formats:
        run.arrays[parameter] = memory_layout.put(run.arrays[parameter], order)
        run.parameters[parameter].store(run.arrays[parameter])
    if not run.is_new:
        run.outputs = execute(program, run.arrays, floats, ints)
        return
    try:
        run.outputs = _first_run(run, program, floats, ints)
    except jax.errors.JaxRuntimeError as error:
        refused = forms.refuse(str(error))
        if not refused:
            raise
        events.warn(refused, KernelWarning)
        run.program = _build(run, streams)
        run.outputs = _first_run(run, run.program, floats, ints)


def _build(run: _Flush, streams: int) -> XlaProgram:
    assert run.key is not None  # noqa: S101  (`_choose`)
    specs = [buffer.spec for buffer in run.parameters]
    counts = len(trace.floats), len(trace.ints)
    return build(run.key, trace.parameter_numbers, specs, counts, streams, pjrt.platform())


def _first_run(run: _Flush, program: XlaProgram, floats: np.ndarray, ints: np.ndarray) -> list[Any]:
    if program_admitted.listeners:
        program_admitted(program, [*run.arrays, floats, ints])
    return execute(program, run.arrays, floats, ints)


def _commit(run: _Flush) -> None:
    """Stores the results in their buffers, empties the trace, counts, and tells the listeners."""
    key, program, arrays, outputs = run.key, run.program, run.arrays, run.outputs
    assert key is not None and program is not None  # noqa: S101, PT018  (`_launch`)
    if not run.is_new and not run.repeats:
        _programs.move_to_end(key)
    metrics.executions += 1
    metrics.operations += program.operations
    flush_ends(program, key.code, run.targets)
    generator.advance(trace.draws)
    for buffer, position in zip(run.targets, program.outputs, strict=True):
        value = outputs[position] if position >= 0 else arrays[~position]
        buffer.store(value)
        if (known := trace.known.get(buffer.number)) is not None and dtypes.is_kept(known):
            dtypes.keep(value, known)
    add_pending(functools.partial(_values_of, list(map(weakref.ref, run.targets))))
    _forget(run.targets)
    if run.is_new:
        if not pjrt.counts_memory():
            pjrt.live_bytes()
        program_cache.add(_programs, key, program)
        recompile_reasons.compiled(program)
    program_ran()


def _abandon(run: _Flush, error: BaseException) -> BaseException:
    """Discards the trace after a failure, and returns what to raise.

    Values that do not depend on the operation that failed are still computed (`failed_step`); others are poisoned if
    they are new or were donated, and otherwise keep the value from before.
    """
    message = f"{type(error).__name__}: {error}{mesh.ended_peers() if isinstance(error, Exception) else ''}"
    reason = error if isinstance(error, XlaAmpError) else StepFailedError(message)
    rest = None
    try:
        if isinstance(error, Exception) and mesh.active is None:
            rest = _rest(run.targets, run.arrays)
            if rest is not None and reason is not error:
                reason = StepFailedError(rest.reason)
    finally:
        _restore(run.targets, run.arrays, reason, rest)
    return reason if isinstance(error, Exception) else error


def _numbers() -> tuple[np.ndarray, np.ndarray, int]:
    """The trace's lifted floats and ints, and how many (seed, offset) pairs precede the ints."""
    streams = trace.streams or [generator.stream()]
    ints = [*(word for stream in streams for word in stream), *trace.ints]
    return np.array(trace.floats, np.float64), np.array(ints, np.int64), len(streams)


def add_pending(results: Callable[[], list[Any]]) -> None:
    """Adds a function that returns the results of a program that was dispatched, for ``sync(wait=True)``."""
    _pending.pop(results, None)
    _pending[results] = object()
    if len(_pending) > _MOST_PENDING:
        del _pending[next(iter(_pending))]


def _values_of(targets: list[weakref.ref[Buffer]]) -> list[Any]:
    return [buffer.array for reference in targets if (buffer := reference()) is not None]


def execute(program: XlaProgram, arrays: list[Any], floats: np.ndarray, ints: np.ndarray) -> list[Any]:
    """Dispatches `program` on the arrays of its parameters and its lifted numbers; returns the outputs."""
    donated = [arrays[index] for index in program.donated]
    kept = [arrays[index] for index in program.kept]
    return dispatch(program, donated, kept, floats, ints)


def dispatch(program: XlaProgram, donated: list[Any], kept: list[Any], floats: Any, ints: Any) -> list[Any]:
    """`execute` with the parameters in the order of the program."""
    program_cache.touch(program)
    if not donated and not kept:  # at least one argument tells the device
        floats, ints = mesh.put(floats), mesh.put(ints)
    arguments = donated, kept, floats, ints
    if not program.is_ready:
        executables.make_ready(program, arguments)
    with jax.transfer_guard_host_to_device("allow"):  # the numbers go along with the call: a sixth of an upload's time
        outputs: list[Any] = program.jitted(*arguments)
    return outputs


def _forget(targets: list[Buffer]) -> None:
    for buffer in targets:
        buffer.number = -1
    for buffer in trace.parameters:
        buffer.number = -1
    trace.clear()


def _rest(targets: list[Buffer], arrays: list[Any]) -> failed_step.Rest | None:
    """What does not depend on the operation that failed, if that can still be computed."""
    if any(array.is_deleted() for array in arrays):
        return None
    key = Key(code=tuple(trace.code), wanted=tuple(buffer.number for buffer in targets), spent=())
    floats, ints, streams = _numbers()
    specs = [buffer.spec for buffer in trace.parameters]
    from xla_amp.lazy.steps import failed_step  # only a failure loads it

    try:
        return failed_step.rest(key, trace.parameter_numbers, specs, arrays, (floats, ints), streams, pjrt.platform())
    except Exception:
        return None  # the first error is the one to report


def _restore(targets: list[Buffer], arrays: list[Any], reason: XlaAmpError, rest: failed_step.Rest | None) -> None:
    """Discards the trace: stores what is left of it; poisons values that were not computed or were donated."""
    for buffer, array in zip(trace.parameters, arrays, strict=True):
        if array.is_deleted():
            buffer.store(Poisoned(f"this tensor's memory was handed to a step that then failed: {reason}"))
    values, lost = (rest.values, rest.lost) if rest is not None else ({}, {})
    written = [buffer for buffer in targets if buffer.array is not None]
    contained = rest is not None and not any(buffer.number in lost for buffer in written)
    for buffer in targets:
        old = buffer.array
        if buffer.number in values and (contained or old is None):
            buffer.store(values[buffer.number])
        elif old is None:
            origin = lost.get(buffer.number, reason)
            buffer.store(Poisoned(f"this tensor was to be computed by a step that failed: {origin}"))
    if values:
        generator.advance(trace.draws)
    if isinstance(reason, StepFailedError):
        reason.contained = contained
    _forget(targets)


def reference_counts(items: list[Any]) -> list[int]:
    """How many references each item has; `ALONE` for one that only the list holds."""
    return list(map(sys.getrefcount, items))


ALONE = reference_counts([object()])[0]
"""References of an item that only its list holds; how many `getrefcount` adds depends on the Python version."""


def _spent(run: _Flush) -> tuple[int, ...]:
    """Parameters whose array can be donated: nothing else holds it, and the old value is not read again.

    Overwritten ones come first.  Otherwise a weight's new value would be written to the memory of a dropped gradient,
    its optimizer state to the memory of the weight, and XLA would copy what is still read.
    """
    # Only memory that a result can have: whether others are still held must not make another program.
    results = {buffer.spec for buffer in run.targets}
    array_counts = reference_counts(run.arrays)
    overwritten, dropped = [], []
    for index, (buffer, number) in enumerate(zip(run.parameters, trace.parameter_numbers, strict=True)):
        if array_counts[index] != ALONE + 1 or buffer.spec not in results:
            continue
        if buffer.number != number and run.held[index]:
            overwritten.append(index)
        elif not run.held[index]:
            dropped.append(index)
    if mesh.is_partitioned():  # only an overwritten value has an output of the same sharding
        dropped = [index for index in dropped if run.parameters[index].number != trace.parameter_numbers[index]]
    return (*overwritten, *dropped)
