"""End the program where a loop without an optimizer repeats, so that it compiles one program for an iteration.

A training loop ends its programs at the optimizer (`step_marker`).  Other loops have no such place: an evaluation, a
sampler, an average.  Recorded as one program they would be as long as the data, and another program for each length.
The rule: **a program of more than `trace.FIRST_LOOK` operations ends where what began it comes again, and so does each
one after it.**

What began it is the module that was called first in it.  Where none was called, it is the operation that was recorded
at the first look: the program ends after the next one that is equal but for dynamic numbers (`Family`).

With gradients a repetition is probably a part of a step: then the rule is for programs of more than `LONG` operations,
and for modules only.  Until an optimizer has made a step, a shorter one ends where the next forward pass begins after
an update by hand: **the first operation that autograd records after a backward pass reads a value that was computed
since.**  A gradient that is accumulated reads the same weights again.

A loss that reads a value, such as the size of a mask, ends the program in which its graph began.  The next programs
of the step count as programs with gradients, up to the end of the backward pass (`step_marker.forward_ended`).

Processes that train together do not end a program with gradients, because what is alive may differ between them.
Nothing is ended while a step is captured, inside a backward pass, or while `find_overflow` runs a step.  Any program
ends at XLA_AMP_TAPE_LIMIT operations.

The rule reads what was recorded, so all processes that record the same end their programs at the same places.  Ending a
program runs it asynchronously; a result may differ in the last place from that of a longer program, in which XLA fuses
other operations.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

import torch

from xla_amp.common import compiling
from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph.trace import FIRST_GLANCE, FIRST_LOOK, Generation, instruction_of, trace
from xla_amp.lazy.programs import execute, mesh
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.tensors import tensor_io
from xla_amp.torch_common import module_paths

LONG = 8192
"""Operations of a program with gradients that may end; compiling takes one to two milliseconds for each."""


class _Repetition:
    """The operation that a program without modules ends after."""

    def __init__(self) -> None:
        self.generation: Generation | None = None
        """The trace that is read."""
        self.position = 0
        """Length of the code that was read."""
        self.most = 0
        """Count of values at which another operation is taken."""
        self.operation: int | None = None
        """Id of its instruction, or the number of the instruction's family."""


class _Pass:
    """The last backward pass that was seen, and the forward pass after it."""

    def __init__(self) -> None:
        self.generation: Generation | None = None
        """The trace."""
        self.number = -1
        """torch's number of the backward pass."""
        self.count = 0
        """Count of values when it ended."""
        self.nodes = -1
        """Count of autograd's nodes on this thread when it was last looked at; -1 at the end of the backward pass."""
        self.others = 0
        """Operations between the two, after the first one, that autograd did not record."""
        self.forward = False
        """Whether the forward pass has begun."""


class _Loop:
    """Where a thread is in a loop."""

    def __init__(self) -> None:
        self.repetition = _Repetition()
        self.backward = _Pass()


def _loop() -> _Loop:
    """Of this thread; the caller holds the trace's lock."""
    found: _Loop | None = trace.loop
    if found is None:
        found = trace.loop = _Loop()
    return found


def flush_if_full(*operands: Any) -> None:
    """`look` if it is time to; the caller holds the trace's lock."""
    if trace.count > trace.limit:
        look(*operands)


def look(*operands: Any) -> None:
    """Ends the program if it is full or a step or an iteration ends here, or sets the next limit.

    Args:
        operands: of the operation that is about to be recorded.
    """
    if trace.count > trace.most:
        return execute.flush()
    if trace.limit < 0:
        step_marker.thread_begins()
    limit = trace.count + FIRST_LOOK
    if _is_kept_whole():
        seen = _loop().backward
        if (number := module_paths.backward_pass()) not in (-1, seen.number):
            seen.number = number
            private_api.when_backward_ends(_backward_ended)
    elif _is_part_of_a_step():
        if trace.nodes is None or mesh.replicas:
            limit = max(limit, LONG)
        elif not step_marker.has_stepped() and _is_after_backward() and (updated := _updated(operands)) is not None:
            _drop_graph(updated)
            step_marker.end_program()
            limit = 0
        elif _looks_at_each():
            limit = trace.count
    elif trace.count <= FIRST_LOOK and _loop().repetition.generation is not trace.generation:
        limit = min(FIRST_LOOK, trace.count + FIRST_GLANCE) if _looks_at_each() else FIRST_LOOK
    elif step_marker.ends_at_first_module():
        limit = trace.most
    elif not _has_gradients():
        limit = trace.count
        if _is_repeated():
            execute.flush()
            found, limit = _loop().repetition, 0
            found.generation, found.position, found.most = trace.generation, 0, LONG
    trace.limit = min(limit, trace.most)


def _looks_at_each() -> bool:
    """Whether each operation is looked at, so that neither a short backward pass nor an update is missed."""
    last = _loop().backward
    seen = last.generation is trace.generation
    if seen and not last.forward:
        return True
    return not step_marker.has_stepped() and trace.count - seen * last.count <= 3 * FIRST_LOOK


def _backward_ended() -> None:
    with trace.lock:
        last = _loop().backward
        last.generation, last.count, last.nodes, last.others = trace.generation, trace.count, -1, 0
        last.forward = False
        trace.limit = 0
        step_marker.forward_ended()


def _is_after_backward() -> bool:
    """Whether autograd records the operation that is looked at, and a backward pass has ended before it."""
    last = _loop().backward
    if last.generation is not trace.generation:
        return False
    before, last.nodes = last.nodes, private_api.autograd_nodes()
    if before in (-1, last.nodes):
        last.others += before != -1 and not last.forward
        return False
    return True


def _updated(operands: Iterable[Any]) -> torch.Tensor | None:
    """A leaf that an operation reads and that was written since the last backward pass, if there is one.

    In a function that ``torch.func`` transforms no tensor requires a gradient here: any tensor counts that operations
    outside of the transform have computed since.
    """
    listed = itertools.chain.from_iterable(each if isinstance(each, (list, tuple)) else (each,) for each in operands)
    tensors: list[torch.Tensor] = [*filter(tensor_io.is_lazy, listed)]
    leaves = [each for each in tensors if each.requires_grad]
    last = _loop().backward
    if not leaves and (last.forward or not last.others):
        tensors = []
    last.forward = True
    for tensor in leaves or tensors:
        base = tensor if tensor._base is None else tensor._base
        number = tensor_io.buffer_of(tensor).number
        if base.is_leaf and number >= last.count and number not in trace.parameter_numbers:
            return tensor
    return None


def _drop_graph(tensor: torch.Tensor) -> None:
    """Waits until autograd's thread has dropped the graph of the last backward pass, whose values would be results.

    The thread drops it before its next task: here the gradient of a tensor of the device by itself, which records
    nothing.
    """
    if tensor.is_floating_point() and not tensor.is_inference():
        leaf = tensor.detach().requires_grad_()
        with trace.lock.released():  # autograd's thread may record another thread's backward pass before
            torch.autograd.grad(leaf, leaf, tensor.detach())


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
    code, seen, repeated = trace.code, _loop().repetition, False
    if seen.generation is not trace.generation or trace.count > seen.most:
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
