"""Repeat a recorded call: write the integers that it recorded to the trace, and flush.

The trace is what the step would have recorded: the same code, the buffers that its inputs have now, Python numbers and
random streams as they are now, and a buffer for each value that the call leaves.  So the flush finds the same program,
and everything that a flush does (meshes, memory, failures, waiting) is as after a recorded call.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import jax
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from xla_amp.errors import StepFailedError
from xla_amp.lazy.capture.reach import NotReplayableError
from xla_amp.lazy.capture.recording import (
    Argument,
    Carried,
    Constant,
    Recording,
    Source,
    State,
    Target,
    Unknown,
    first_difference,
)
from xla_amp.lazy.graph.buffer import Buffer, Poisoned
from xla_amp.lazy.graph.trace import Spec, trace
from xla_amp.lazy.programs import execute, memory_layout
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import generator


class Replay:
    """The call that two recorded calls in a row agree on.

    Args:
        earlier, later: the two calls.
        result: what the later one returned.
        tensors: its tensor arguments.

    Raises:
        NotReplayableError: they differ, or an input is neither an argument, nor state, nor the same in both calls.
    """

    def __init__(self, earlier: Recording, later: Recording, result: Any, tensors: list[torch.Tensor]) -> None:
        difference = first_difference(earlier, later)
        if difference is not None:
            raise NotReplayableError(f"its calls differ: {difference}")
        self._recorded = later
        self._references: list[Callable[[], Buffer | None]] = [_nothing] * len(later.sources)
        """The buffers of state, by slot."""
        self._arguments: list[tuple[int, int]] = []
        """(slot, argument) pairs."""
        self._constants: list[tuple[int, Spec, jax.Array]] = []
        self._dropped: list[int] = []
        """Slots whose buffer gets a value of this call, which does not overwrite the old one."""
        for slot, source in enumerate(later.sources):
            self._add_source(slot, source)
        self._computed = later.targets[later.overwritten :]
        seed, offset = later.begin
        self._streams = [(None if s == seed else s, at - offset if s == seed else at) for s, at in later.streams]
        self._draws = later.end[1] - offset
        items, structure = tree_flatten(result)
        self._structure = None if len(items) == 1 and items[0] is result else structure
        self._results = [self._result(item, tensors) for item in items]

    def _add_source(self, slot: int, source: Source) -> None:
        match source:
            case Argument(position):
                self._arguments.append((slot, position))
            case State(buffer):
                self._references[slot] = buffer
            case Carried(target):  # what the next call reads is what this one has left
                self._references[slot] = self._recorded.targets[target].buffer
                self._dropped.append(slot)
            case Constant(spec, array):
                self._constants.append((slot, spec, array))
            case Unknown(reason):
                raise NotReplayableError(reason)

    def _result(self, item: Any, tensors: list[torch.Tensor]) -> _Result:
        if not isinstance(item, torch.Tensor):
            return _Result(value=item)
        if item.device.type != DEVICE_TYPE or item.layout is not torch.strided:
            raise NotReplayableError(
                f"it returns a tensor on {item.device} ({item.layout}), which a replay would not compute; return a "
                f"dense tensor on {DEVICE_TYPE!r}"
            )
        if item.is_conj() or item.is_neg():
            raise NotReplayableError("it returns a view that is conjugated or negated; call resolve_conj() on it")
        buffer, offset = tensor_io.buffer_of(item), item.storage_offset()
        geometry = item.dtype, tuple(item.shape), item.stride(), offset
        for index, tensor in enumerate(tensors):
            if tensor is item:
                return _Result(argument=index)
        for index, tensor in enumerate(tensors):
            if tensor_io.buffer_of(tensor) is buffer:
                return _Result(argument=index, geometry=geometry)
        for position, target in enumerate(self._computed):
            if target.buffer() is buffer:
                return _Result(computed=position, geometry=None if tensor_io.is_whole(item) else geometry)
        return _Result(value=item)  # of the state

    # -- replaying -----------------------------------------------------------------------------------------------

    def run(self, tensors: list[torch.Tensor], floats: Iterable[float]) -> list[Buffer] | None:
        """Runs the call again; the caller holds the trace's lock.

        Args:
            tensors: tensor arguments.
            floats: the lifted floats.

        Returns:
            The buffers of what it computes, for `results`; None if a value that it needs does not exist.

        Raises:
            StepFailedError: the program failed, or a value was lost in a failed step.
        """
        execute.flush()
        computed = self._fill([tensor_io.buffer_of(tensor) for tensor in tensors], floats)
        if computed is not None:
            seed, offset = generator.state()
            execute.flush(self._recorded.spent)
            if self._draws:
                generator.set_state(seed, offset + self._draws)
        return computed

    def _fill(self, arguments: Sequence[Buffer], floats: Iterable[float]) -> list[Buffer] | None:
        """Writes the call to the empty trace; returns the buffers of what it computes.

        A separate function: a variable that holds a parameter at the flush would count as a tensor that does.
        """
        recorded, found = self._recorded, [reference() for reference in self._references]
        for slot, index in self._arguments:
            found[slot] = arguments[index]
        for slot, spec, array in self._constants:
            found[slot] = Buffer(spec, array=array)
        parameters = [buffer for buffer in found if buffer is not None]
        if len(parameters) < len(found) or not _all_written(parameters):
            return None
        for slot in self._dropped:
            parameters[slot] = Buffer(parameters[slot].spec, array=parameters[slot].array)
        computed = [_buffer(target, arguments) for target in self._computed]
        for buffer, target in zip(computed, self._computed, strict=True):
            buffer.number = target.number
            if target.is_new:
                buffer.array = None  # the program may use the old value's memory
        _unshare([parameters[slot] for slot in recorded.donated])
        for buffer, number in zip(parameters, recorded.final_numbers, strict=True):
            buffer.number = number
        trace.parameters.extend(parameters)
        trace.parameter_numbers.extend(recorded.parameter_numbers)
        trace.computed.extend(map(weakref.ref, computed))
        trace.code.extend(recorded.code)
        trace.count = recorded.count
        trace.floats.extend(floats)
        trace.ints.extend(recorded.ints)
        seed, offset = generator.state()
        trace.streams.extend((seed, offset + at) if s is None else (s, at) for s, at in self._streams)
        return computed

    def results(self, tensors: list[torch.Tensor], computed: list[Buffer] | None = None) -> Any:
        """What the call returns, as new tensors, so that no replay overwrites them.

        Args:
            tensors: tensor arguments.
            computed: the buffers of what it computed; None for the recorded call.
        """
        if computed is None:
            computed = [_buffer(target, ()) for target in self._computed]
        bases: dict[int, torch.Tensor] = {}
        items = [self._item(each, tensors, computed, bases) for each in self._results]
        return items[0] if self._structure is None else tree_unflatten(items, self._structure)

    def _item(
        self, result: _Result, tensors: list[torch.Tensor], computed: list[Buffer], bases: dict[int, torch.Tensor]
    ) -> Any:
        position = result.computed
        if result.argument is not None:
            base = tensors[result.argument]
        elif position is None:
            return result.value
        elif position in bases:
            base = bases[position]
        else:
            buffer = computed[position]
            if self._computed[position].buffer() is buffer:  # an attribute has it, too
                buffer = Buffer(buffer.spec, array=buffer.array)
            base = bases[position] = tensor_io.tensor_over(buffer)
        return base if result.geometry is None else tensor_io.new_view(base, *result.geometry)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Result:
    """An item that a call returns: a Python value or a tensor of the state, an argument, or what the call computes."""

    value: Any = None
    argument: int | None = None
    """Index among the tensor arguments."""
    computed: int | None = None
    """Index among the values that the call computes."""
    geometry: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], Any] | None = None
    """dtype, shape, strides and offset of a view; None for the whole value."""


def _nothing() -> None:
    """In place of a reference, for an input that is no state."""


def _buffer(target: Target, arguments: Sequence[Buffer]) -> Buffer:
    """The buffer that gets a value: an argument's, the one that the recorded call left, or a new one."""
    if target.argument is not None and arguments:
        return arguments[target.argument]
    return target.buffer() or Buffer(target.spec)


_array = attrgetter("array")


def _all_written(buffers: Sequence[Buffer]) -> bool:
    """Whether each of them has an array; False if memory was never written.

    Raises:
        StepFailedError: one was lost in a failed step.
    """
    kinds = set(map(type, map(_array, buffers)))
    if Poisoned in kinds:
        raise StepFailedError(next(each.array.reason for each in buffers if type(each.array) is Poisoned))
    return type(None) not in kinds


def _unshare(buffers: list[Buffer]) -> None:
    """Copies arrays that others hold too, such as a copy of a weight: the program takes their memory."""
    counts = execute.reference_counts(list(map(_array, buffers)))
    for buffer, count in zip(buffers, counts, strict=True):
        if count > execute.ALONE + 1:  # its buffer's
            buffer.array = memory_layout.copy(buffer.array)
