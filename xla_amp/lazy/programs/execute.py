"""Flush the trace: run it as one executable, asynchronously, and store the results in the live buffers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np

from xla_amp.common import events
from xla_amp.errors import KernelWarning, StepFailedError, XlaAmpError
from xla_amp.lazy.base import dtypes, forks, private_api
from xla_amp.lazy.graph import generator
from xla_amp.lazy.graph import trace as graph
from xla_amp.lazy.graph.trace import Buffer, OwnPoint, Poisoned, trace
from xla_amp.lazy.programs import (
    dynamic_numbers,
    executables,
    memory_layout,
    mesh,
    pjrt,
    program_cache,
    recompile_reasons,
)
from xla_amp.lazy.programs.compile import Key, Shardings, XlaProgram, build
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lowering import forms

_programs = program_cache.new_cache()
_pending: dict[Callable[[], list[Any]], object] = {}
"""Functions that return the results, as far as they are referenced, of the last programs that were not waited for,
each with a mark of its dispatch.  XLA:CPU runs those of several threads side by side."""
_MOST_PENDING: Final = 64
_array, _at, _spec = map(operator.attrgetter, ("array", "at", "spec"))


@OwnPoint
def flush_nears() -> None:
    """Before a flush looks which values are referenced; may reference more of them."""


@OwnPoint
def flush_begins(run: Run) -> None:
    """Before the program of a trace is chosen; while someone listens, integers of the program stay constants."""


@events.Point
def program_admitted(program: XlaProgram, arguments: Sequence[Any]) -> None:
    """Before the first run of each program, with its inputs; raises to reject it."""


@events.Point
def program_ran() -> None:
    """After the results of a program were stored."""


@events.Point
def waited() -> None:
    """After Python has waited for all programs."""


def flush() -> None:
    """Runs the trace asynchronously, and starts an empty one; does nothing if nothing was recorded.

    Raises:
        StepFailedError: an operation could not be lowered, or XLA rejected the program.  All tensors keep the values
            from before the first operation of the trace; new ones raise when they are read.
    """
    forks.check()
    with trace.lock:
        if trace.code:
            run_program(_recorded())


graph.must_run.subscribe(flush)


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
        metrics.host_waits()
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
    waited()


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
class Run:
    """A trace, or a part of one, that runs as a program: what it reads and writes."""

    key: Key
    parameters: list[Buffer]
    floats: list[float]
    ints: list[int]
    streams: list[tuple[int, int]]
    """(seed, offset) of the random streams."""
    numbers: list[int] = dataclasses.field(default_factory=list)
    """Number in the trace of the value of each parameter."""
    present: list[int] = dataclasses.field(default_factory=list)
    """Number of the value that each parameter's buffer has now."""
    overwritten: list[int] = dataclasses.field(default_factory=list)
    """The parameters that are the first of the targets, in that order."""
    targets: list[Buffer] = dataclasses.field(default_factory=list)
    """Buffers that get the values that `key` wants: overwritten parameters first and in order, then what is computed.

    JAX pairs the n-th donated input of a spec with its n-th output, so that a weight's new value is written to the old
    one's memory.
    """
    draws: int = 0
    """Random operations of the device's generator."""
    generators: bool = False
    """Whether it draws from a torch.Generator."""
    held: Sequence[bool] | None = None
    """Which parameters a storage has, so that their buffers can still be read; None if `key` is complete (a replay)."""
    inputs: list[Any] = dataclasses.field(default_factory=list)
    """What an observer keeps of the value of each parameter."""
    made: list[bool] = dataclasses.field(default_factory=list)
    """Which targets had no value before, if it is observed."""
    where: str = ""
    """The user's ``file:line`` that ended it, if it is observed."""
    arrays: list[Any] = dataclasses.field(default_factory=list)
    """Of the parameters, while it runs."""
    program: XlaProgram | None = None
    """While it runs."""
    is_new: bool = False
    """Whether the program was built for this run."""
    repeats: bool = False
    """Whether the run before had the same program."""

    def numbers_as_data(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The floats; and the words of the streams, then the integers."""
        ints = [*itertools.chain.from_iterable(self.streams), *self.ints]
        return np.array(self.floats, np.float64), np.array(ints, np.int64)


def run_program(run: Run) -> None:
    """Runs a program and stores its results; the caller holds the trace's lock.

    The trace, which is empty or what runs, is empty afterwards.

    Raises:
        StepFailedError: as of `flush`.
    """
    if graph.others():
        graph.release([*run.targets, *map(run.parameters.__getitem__, run.key.spent)], memory_layout.copy)
    if run.held is None and mesh.active is not None:
        mesh.move_to_mesh(run.parameters)
    run.arrays = list(map(_array, run.parameters))
    try:
        _choose(run)
        with private_api.x64():
            outputs = _launch(run)
    except BaseException as error:
        reason = _abandon(run, error)
        if reason is error:
            raise
        raise reason from error
    _commit(run, outputs)
    run.arrays, run.program = [], None


def _recorded() -> Run:
    """Reads the trace; no value changes."""
    for listener in trace.listeners.get(flush_nears, ()):  # the lock is held, so the trace is this thread's
        listener()
    if mesh.active is not None:
        mesh.move_to_mesh(trace.parameters)
    held = list(map(ALONE.__lt__, reference_counts(trace.parameters)))
    parameters, numbers = list(trace.parameters), list(trace.parameter_numbers)
    present = trace.numbers()
    overwritten = [index for index, at in enumerate(present) if at != numbers[index] and held[index]]
    computed = trace.results()
    targets = [*map(parameters.__getitem__, overwritten), *computed]
    run = Run(
        key=Key(code=tuple(trace.code), wanted=tuple(map(_at, targets)), spent=()),
        parameters=parameters,
        numbers=numbers,
        present=present,
        overwritten=overwritten,
        targets=targets,
        floats=list(trace.floats),
        ints=list(trace.ints),
        streams=list(trace.streams) or [generator.stream()],
        draws=trace.draws,
        generators=bool(trace.generators),
        held=held,
    )
    for listener in trace.listeners.get(flush_begins, ()):
        listener(run)
    return run


def _choose(run: Run) -> None:
    """Finds the program, None if it has to be built."""
    if mesh.active is not None and mesh.is_partitioned():
        placements = tuple(array.sharding for array in run.arrays)
        shardings = Shardings(placements, mesh.output_shardings(run.targets, len(run.overwritten)))
        run.key = run.key._replace(shardings=shardings)
    if run.held is not None:
        run.key = run.key._replace(spent=_spent(run, run.held))
    # Most steps repeat the step before, and comparing thousands of numbers costs less than hashing them.
    before, program = next(reversed(_programs.items()), (None, None))
    run.repeats = before == run.key
    if before is not None and run.repeats:
        run.key = before  # a replay of this run compares one object
    else:
        program = _programs.get(run.key)
        if program is None and run.held is not None and not flush_begins.listeners:
            if dynamic_numbers.replace():
                run.key = run.key._replace(code=tuple(trace.code))
                run.floats, run.ints = list(trace.floats), list(trace.ints)
                program = _programs.get(run.key)
            program = program or _donating_more(run)
    run.program, run.is_new = program, program is None


_FEW: Final = 64
"""Bytes that a program may leave where it could have taken them."""


def _donating_more(run: Run) -> XlaProgram | None:
    """A program that differs only in the arrays that it takes: copies for it cost less than compiling another."""
    key = run.key
    for other, program in reversed(_programs.items()):
        if other._replace(spent=key.spent) != key:
            continue
        left = [run.parameters[index].spec for index in set(key.spent).difference(other.spent)]
        if sum(each.size * each.numpy_dtype.itemsize for each in left) <= _FEW and len(other.spent) > len(left):
            for index in set(other.spent).difference(key.spent):
                run.arrays[index] = memory_layout.copy(run.arrays[index])
            run.key = other
            return program
    return None


def _launch(run: Run) -> list[Any]:
    """Dispatches the program, which is built and compiled if it is new; call with 64-bit types enabled."""
    program = run.program = run.program or _build(run)
    if run.held is None:  # arrays that others hold too, such as a copy of a weight
        counts = reference_counts(run.arrays)
        for index in [index for index in program.donated if counts[index] != ALONE + 1]:
            run.arrays[index] = memory_layout.copy(run.arrays[index])
    for parameter, order in program.input_formats.items():
        run.arrays[parameter] = memory_layout.put(run.arrays[parameter], order)
        run.parameters[parameter].store(run.arrays[parameter])
    try:
        return _execute(run, program)
    except jax.errors.JaxRuntimeError as error:
        refused = forms.refuse(str(error)) if run.is_new else ""
        if not refused:
            raise
        events.warn(refused, KernelWarning)
        run.program = _build(run)
        return _execute(run, run.program)


def _build(run: Run) -> XlaProgram:
    specs = [buffer.spec for buffer in run.parameters]
    counts = len(run.floats), len(run.ints)
    program = build(run.key, run.numbers, specs, counts, len(run.streams), pjrt.platform())
    program.buffers.update((*run.parameters, *run.targets))
    program.trains = bool(run.overwritten)
    return program


def _execute(run: Run, program: XlaProgram) -> list[Any]:
    floats, ints = run.numbers_as_data()
    if run.is_new and program_admitted.listeners:
        program_admitted(program, [*run.arrays, floats, ints])
    donated = list(map(run.arrays.__getitem__, program.donated))
    kept = list(map(run.arrays.__getitem__, program.kept))
    return dispatch(program, donated, kept, floats, ints)


def _commit(run: Run, outputs: list[Any]) -> None:
    """Stores the results in their buffers, empties the trace, counts, and tells the listeners."""
    key, program, arrays = run.key, run.program, run.arrays
    assert program is not None  # noqa: S101  (`_launch`)
    if not run.is_new and not run.repeats:
        _programs.move_to_end(key)
    metrics.executions += 1
    metrics.operations += program.operations
    if run.draws or trace.generators:
        generator.advance(run.draws)
    values = [outputs[position] if position >= 0 else arrays[~position] for position in program.outputs]
    graph.store(run.targets, values)
    for number, value in zip(key.wanted, values, strict=True) if trace.known else ():
        if (known := trace.known.get(number)) is not None and dtypes.is_kept(known):
            dtypes.keep(value, known)
    add_pending(functools.partial(_values_of, list(map(weakref.ref, run.targets))))
    trace.clear()
    if run.is_new:
        if pjrt.platform() == "cpu":  # which keeps no statistics of its memory
            pjrt.live_bytes()
        program_cache.add(_programs, key, program)
        recompile_reasons.compiled(program)
    for listener in program_ran.listeners:
        listener()


def _abandon(run: Run, error: BaseException) -> BaseException:
    """Discards the trace after a failure, and returns what to raise.

    Values are poisoned if they are new or were donated, and otherwise stay as they were.
    """
    message = f"{type(error).__name__}: {error}{mesh.ended_peers() if isinstance(error, Exception) else ''}"
    reason = error if isinstance(error, XlaAmpError) else StepFailedError(message)
    for buffer, array in zip(run.parameters, run.arrays, strict=True):
        if array.is_deleted():
            buffer.store(Poisoned(f"this tensor's memory was handed to a step that then failed: {reason}"))
    for buffer in run.targets:
        if buffer.array is None:
            buffer.store(Poisoned(f"this tensor was to be computed by a step that failed: {reason}"))
    trace.clear()
    return reason if isinstance(error, Exception) else error


def add_pending(results: Callable[[], list[Any]]) -> None:
    """Adds a function that returns the results of a program that was dispatched, for ``sync(wait=True)``."""
    _pending.pop(results, None)
    _pending[results] = object()
    if len(_pending) > _MOST_PENDING:
        del _pending[next(iter(_pending))]


def _values_of(targets: list[weakref.ref[Buffer]]) -> list[Any]:
    return [buffer.array for reference in targets if (buffer := reference()) is not None]


def dispatch(program: XlaProgram, donated: list[Any], kept: list[Any], floats: Any, ints: Any) -> list[Any]:
    """Dispatches `program`, whose arguments these are; returns the outputs."""
    program_cache.touch(program)
    if not donated and not kept:  # at least one argument tells the device
        floats, ints = mesh.put(floats), mesh.put(ints)
    arguments = donated, kept, floats, ints
    if not program.is_ready:
        executables.make_ready(program, arguments)
    with jax.transfer_guard_host_to_device("allow"):  # the numbers go along with the call: a sixth of an upload's time
        outputs: list[Any] = program.jitted(*arguments)
    return outputs


def reference_counts(items: list[Any]) -> list[int]:
    """How many references each item has; `ALONE` for one that only the list holds."""
    return list(map(sys.getrefcount, items))


ALONE = reference_counts([object()])[0]
"""References of an item that only its list holds; how many `getrefcount` adds depends on the Python version."""


def _spent(run: Run, held: Sequence[bool]) -> tuple[int, ...]:
    """Parameters whose array can be donated: nothing else holds it, and the old value is not read again.

    Overwritten ones come first.  Otherwise a weight's new value would be written to the memory of a dropped gradient,
    its optimizer state to the memory of the weight, and XLA would copy what is still read.
    """
    # Only memory that a result can have: whether others are still held must not make another program.
    results = set(map(_spec, run.targets))
    array_counts = reference_counts(run.arrays)
    overwritten, dropped = [], []
    for index, buffer in enumerate(run.parameters):
        if array_counts[index] != ALONE + 1 or buffer.spec not in results:
            continue
        if run.present[index] != run.numbers[index] and held[index]:
            overwritten.append(index)
        elif not held[index]:
            dropped.append(index)
    if (
        mesh.active is not None and mesh.is_partitioned()
    ):  # only an overwritten value has an output of the same sharding
        dropped = [index for index in dropped if run.present[index] != run.numbers[index]]
    return (*overwritten, *dropped)
