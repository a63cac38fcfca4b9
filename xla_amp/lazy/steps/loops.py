"""End the program where a loop without an optimizer repeats, so that it compiles one program for an iteration.

A training loop ends its programs at the optimizer (`step_marker`).  Other loops have no such place: an evaluation, a
sampler, an average.  Recorded as one program they would be as long as the data, and another program for each length.
The rule: **a program of more than `trace.FIRST_LOOK` operations ends where what began it comes again, and so does each
one after it.**

What began it is the module that was called first in it.  Where none was called, it is the operation that was recorded
at the first look: the program ends after the next one that is equal but for dynamic integers (`Family`).

With gradients a repetition is probably a part of a step: then the rule is for programs of more than `LONG` operations,
and for modules only.  Processes that train together do not end such a program, because what is alive may differ between
them.  Nothing is ended while a step is captured, inside a backward pass, or while `find_overflow` runs a step.  Any
program ends at XLA_AMP_TAPE_LIMIT operations.

The rule reads what was recorded, so all processes that record the same end their programs at the same places.  Ending a
program runs it asynchronously; a result may differ in the last place from that of a longer program, in which XLA fuses
other operations.
"""

from __future__ import annotations

import threading

from xla_amp.backends import module_paths
from xla_amp.common import compiling
from xla_amp.lazy import private_api
from xla_amp.lazy.graph.trace import FIRST_LOOK, instruction_of, trace
from xla_amp.lazy.programs import execute, mesh
from xla_amp.lazy.steps import step_marker

LONG = 8192
"""Operations of a program with gradients that may end; compiling takes one to two milliseconds for each."""


class _Repetition:
    """The operation that a program without modules ends after."""

    def __init__(self) -> None:
        self.generation = -1
        """Of the trace that is read."""
        self.position = 0
        """Length of the code that was read."""
        self.most = 0
        """Count of values at which another operation is taken."""
        self.operation: int | None = None
        """Id of its instruction, or the number of the instruction's family."""


_repetition = _Repetition()


def flush_if_full() -> None:
    """Ends the program if it is full or ends with a repetition; the caller holds the trace's lock."""
    if trace.count > trace.limit:
        look()


def look() -> None:
    """Ends the program if it is full or ends with a repetition, or sets the next limit."""
    if trace.count > trace.most:
        return execute.flush()
    limit = trace.count + FIRST_LOOK
    if _is_kept_whole():
        pass
    elif _is_part_of_a_step():
        limit = max(limit, LONG)
    elif step_marker.ends_at_first_module():
        limit = trace.most
    elif not _has_gradients():
        limit = trace.count
        if _is_repeated():
            execute.flush()
            _repetition.generation, _repetition.position, _repetition.most, limit = trace.generation, 0, LONG, 0
    trace.limit = min(limit, trace.most)


def _has_gradients() -> bool:
    return trace.nodes != (threading.get_ident(), private_api.autograd_nodes())


def _is_kept_whole() -> bool:
    """Whether a step is captured, a backward pass runs, or a tool reads each operation of a step."""
    return bool(execute.flush_begins.listeners) or module_paths.in_backward() or compiling.runs_few_times()


def _is_part_of_a_step() -> bool:
    return _has_gradients() and (trace.count <= LONG or mesh.replicas)


def _may_repeat() -> bool:
    return not (_is_kept_whole() or _is_part_of_a_step())


def _is_repeated() -> bool:
    """Whether the operation of the repetition was recorded since the last look; takes one if there is none."""
    code, seen, repeated = trace.code, _repetition, False
    if seen.generation != trace.generation or trace.count > seen.most:
        seen.generation, seen.position, seen.operation = trace.generation, len(code), None
        seen.most = trace.count + LONG
    position = min(seen.position, len(code))
    while position < len(code):
        instruction = instruction_of(code[position])
        if instruction.emit is not None:
            operation = instruction.id if instruction.family is None else instruction.family.number
            repeated = repeated or operation == seen.operation
            seen.operation = operation if seen.operation is None else seen.operation
        position += instruction.inputs + (3 if instruction.random else 1)
    seen.position = position
    return repeated


step_marker.may_repeat.subscribe(_may_repeat)
