"""End the step where a recorded loop repeats, so that a loop compiles one program for one iteration.

A training loop ends its steps at the optimizer (`step_marker`).  Other loops have no such place: an evaluation, a
sampler, features of a data set, an average.  Recorded as one program they would be as long as the data, and another
program for each length.  Each recorded operation compares the size of the trace with a limit; at the limit `look` reads
the trace and applies these rules.

1. A loop is a sequence of operations at the end of the trace that is there `REPEATS` times.  Of several the one is
   taken that began earliest, then the shortest: a batch before the layers in it.
2. Layers are no iterations.  A stack of layers reads new weights in each repetition, a loop reads the same ones, or
   what was uploaded meanwhile.  So a repetition may not read more new old tensors than tensors that were read before.
3. Where gradients are computed, a repetition is probably a part of a step: time steps of a recurrent network, parts of
   an accumulated gradient.  Then it must be there `REPEATS_WITH_GRADIENTS` times, leave no more values alive than the
   one before, and not be inside a backward pass.  Processes that train together do not end such a loop, because
   what is alive may differ between them.
4. The step ends at the first operation of a repetition.  Then each iteration is a step, until one is different.
5. A loop that ends, and begins again before a value is read, is part of a larger one, which is taken instead; unless
   the trace is longer than `LONG` by then.
6. A sequence that grows, as in the generation of text, has other shapes in each iteration.  In a trace of `GROWING`
   operations without gradients, operations of the same names count as the same.  Each length is a program then, which
   compiles faster than one program of all lengths.
7. Nothing is ended while a step is captured, exported or traced for JAX.

The rules read what was recorded, so all processes that record the same end their steps at the same places.  Ending a
step runs it asynchronously; a result may differ in the last place from that of a longer program, in which XLA fuses
other operations.
"""

from __future__ import annotations

import threading
from typing import Any

from xla_amp.backends import module_paths
from xla_amp.lazy import private_api
from xla_amp.lazy.graph.tape import Node, Tape
from xla_amp.lazy.graph.trace import FIRST_LOOK, Family, instruction_of, trace
from xla_amp.lazy.programs import execute, mesh

REPEATS = 2
REPEATS_WITH_GRADIENTS = 16
"""Up to so many parts of an accumulated gradient are one program."""
LONG = 2048
"""Operations up to which it is worth waiting for a larger loop; compiling takes one to two milliseconds for each."""
GROWING = 256
"""Operations from which iterations may differ in shapes."""


class _Loop:
    """The loop that the last flush ended a repetition of."""

    def __init__(self) -> None:
        self.generation = -1
        """Generation of the trace that began then."""
        self.operations: list[Any] = []
        """Ids of the operations of a repetition, or names of one that grows; empty after one that was different."""
        self.growing = False
        self.repeated = False
        """Whether a repetition followed that was the same."""
        self.ended: set[tuple[Any, ...]] = set()
        """Loops that ended since a flush for another reason."""
        self.inner: set[tuple[Any, ...]] = set()
        """Loops inside larger ones."""
        self.alive: tuple[int, int, int] = (-1, 0, 0)
        """(generation, operations, values alive) when a loop with gradients was seen."""


_loop = _Loop()


class _Operations:
    """What each operation of the trace is, without the reads of tensors; read as far as the last look."""

    def __init__(self) -> None:
        self.cuts = -1
        """`trace.cuts` of the trace that was read."""
        self.length = 0
        """Length of the code that was read."""
        self.ids: list[int] = []
        """Id of each instruction; of one with a family the family's number."""
        self.names: list[str] = []

    def read(self) -> _Operations:
        """Reads what was recorded since."""
        code, ids, names = trace.code, self.ids, self.names
        position = self.length
        if self.cuts != trace.cuts:
            position, self.cuts = 0, trace.cuts
            ids.clear()
            names.clear()
        end = len(code)
        while position < end:
            instruction = instruction_of(code[position])
            if instruction.emit is not None:
                family = instruction.family
                ids.append(instruction.id if family is None else family.number)
                names.append(instruction.name)
            position += instruction.inputs + (3 if instruction.random else 1)
        self.length = position
        return self


_operations = _Operations()


def flush_if_full() -> None:
    """Ends the step if the trace is full or ends with a whole repetition; the caller holds the trace's lock."""
    if trace.count > trace.limit:
        look()


def look() -> None:
    """Ends the step if the trace is full or ends with a whole repetition, or sets the next limit."""
    if trace.count > trace.most:
        execute.flush()
    elif execute.flush_begins.listeners or module_paths.in_backward():
        _wait()
    elif trace.generation == _loop.generation and _loop.operations:
        _continue()
    else:
        if trace.generation != _loop.generation:
            _loop.ended.clear()
        _search()


def _continue() -> None:
    """Ends the step after the next repetition of the loop."""
    read = _operations.read()
    operations: list[Any] = read.names if _loop.growing else read.ids
    missing = len(_loop.operations) - len(operations)
    if operations == _loop.operations:
        _loop.repeated = True
        _end(_loop.operations, trace.differing)
    elif missing > 0 and operations == _loop.operations[: len(operations)]:
        _wait(missing)
    else:
        if _loop.repeated:
            _loop.ended.add(_name(_loop.operations))
        _loop.operations = []
        _search()


def _search() -> None:
    gradients = trace.nodes != (threading.get_ident(), private_api.autograd_nodes())
    if gradients and mesh.replicas:
        return _wait()
    least = REPEATS_WITH_GRADIENTS if gradients else REPEATS
    read = _operations.read()
    ids: list[Any] = read.ids
    inner = _loop.inner if len(ids) < LONG else set()
    found = repetition(ids, least, inner)
    growing = found is None and not gradients and len(ids) >= GROWING
    if growing:
        ids = read.names
        found = repetition(ids, least, inner)
    if found is None:
        return _wait()
    start, period = found
    name = _name(ids[-period:])
    if name in _loop.ended and len(ids) < LONG:
        _loop.inner.add(name)
        return _wait()
    tape = Tape(trace.code)
    operations = [node for node in tape if not node.is_parameter]
    if _is_stack(tape, operations, period):
        return _wait()
    behind = (len(ids) - start) % period
    if behind and len(ids) < start + (least + 2) * period:  # later than that a kernel begins at no such place
        return _wait(period - behind)
    if gradients and not _is_steady(len(ids), period):
        return _wait(period)
    _loop.repeated, _loop.growing = False, growing
    _end(ids[-period:], _differing(operations, period))


def _wait(operations: int = 0) -> None:
    """Sets the limit to so many more operations, or to the next of a fixed sequence of sizes."""
    limit = trace.count + operations - 1
    if not operations:
        limit = FIRST_LOOK
        while limit <= trace.count:
            limit += limit // 4
    trace.limit = min(limit, trace.most)


def _end(operations: list[Any], differ: frozenset[Family]) -> None:
    execute.flush()
    _loop.generation, _loop.operations = trace.generation, operations
    trace.differing = differ
    _wait(len(operations))


def _name(operations: list[Any]) -> tuple[Any, ...]:
    """A key of a loop that does not depend on where its repetition begins."""
    return tuple(sorted(operations))


def repetition(ids: list[Any], least: int, inner: set[tuple[Any, ...]]) -> tuple[int, int] | None:
    """(first index, length) of what `ids` ends with at least `least` times; the earliest one, then the shortest.

    >>> repetition([9, 8, 1, 2, 1, 2, 1], 2, set())
    (2, 2)
    """
    size, last = len(ids), len(ids) - 1
    best: tuple[int, int] | None = None
    known: list[tuple[int, int]] = []
    for period in range(1, size // least + 1):
        if ids[last - period] != ids[last]:
            continue
        if ids[size - period :] != ids[size - 2 * period : size - period]:
            continue
        start = size - 2 * period
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        if size - start < least * period or any(not period % n and start >= first for first, n in known):
            continue  # too few, or several of a shorter one
        known.append((start, period))
        if (best is None or start < best[0]) and _name(ids[-period:]) not in inner:
            best = start, period
    return best


def _is_stack(tape: Tape, operations: list[Node], period: int) -> bool:
    """Whether the last repetition reads more new tensors than old ones, except for those uploaded in the loop."""
    before, loop_begin = operations[-period - 1].first, operations[-2 * period].first
    used = {number for node in operations[-period:] for number in node.inputs}
    old = new = 0
    for node in tape:
        if not node.is_parameter:
            continue
        if node.first < before:
            old += node.first in used
        elif trace.uploads.get(id(trace.parameters[node.at.parameters]), -1) < loop_begin:
            new += 1
    return new > old


def _differing(operations: list[Node], period: int) -> frozenset[Family]:
    """Families whose integers differ between the last two repetitions."""
    found = set()
    for one, other in zip(operations[-2 * period : -period], operations[-period:], strict=True):
        before, now = one.instruction, other.instruction
        if now.family is not None and (before.family, before.integers) != (now.family, now.integers):
            found.add(now.family)
    return frozenset(found)


def _is_steady(operations: int, period: int) -> bool:
    """Whether as many computed values are alive as one repetition before."""
    alive = sum(buffer() is not None for buffer in trace.computed)
    before, _loop.alive = _loop.alive, (trace.generation, operations, alive)
    return before == (trace.generation, operations - period, alive)
