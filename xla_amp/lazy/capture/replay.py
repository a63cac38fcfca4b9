"""Repeat a recorded call: write the integers that it recorded to the trace, and flush.

The trace is what the step would have recorded: the same code, the buffers that its inputs have now, Python numbers and
random streams as they are now, and a buffer for each value that the call leaves.  So the flush finds the same program,
and everything that a flush does (meshes, memory, failures, waiting) is as after a recorded call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from xla_amp.backends.trees import tree_flatten, tree_unflatten
from xla_amp.errors import StepFailedError
from xla_amp.lazy.capture.reach import NotReplayableError
from xla_amp.lazy.capture.recording import Recording, Target, first_difference
from xla_amp.lazy.graph.buffer import Buffer, Poisoned
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute, memory_layout
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import generator

Result: TypeAlias = Callable[[Sequence[torch.Tensor], Mapping[int, torch.Tensor]], Any]
"""Gives an item that a call returns from its tensor arguments and the values that it computed."""


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
        self._sources: list[Callable[[Sequence[Buffer]], Buffer | None]] = []
        for source in later.sources:
            if isinstance(source, str):
                raise NotReplayableError(source)
            self._sources.append(source)
        self._computed = later.targets[later.overwritten :]
        seed, offset = later.begin
        self._streams = [(None if s == seed else s, at - offset if s == seed else at) for s, at in later.streams]
        self._draws = later.end[1] - offset
        items, structure = tree_flatten(result)
        self._structure = None if len(items) == 1 and items[0] is result else structure
        self._returned: set[int] = set()
        """Which of the computed values it returns."""
        self._results = [self._result(item, tensors) for item in items]

    def _result(self, item: Any, tensors: list[torch.Tensor]) -> Result:
        if not isinstance(item, torch.Tensor):
            return lambda *_: item
        if item.device.type != DEVICE_TYPE or item.layout is not torch.strided:
            raise NotReplayableError(
                f"it returns a tensor on {item.device} ({item.layout}), which a replay would not compute; return a "
                f"dense tensor on {DEVICE_TYPE!r}"
            )
        if item.is_conj() or item.is_neg():
            raise NotReplayableError("it returns a view that is conjugated or negated; call resolve_conj() on it")
        buffer, offset = tensor_io.buffer_of(item), int(item.storage_offset())
        geometry = item.dtype, tuple(item.shape), item.stride(), offset
        for index, tensor in enumerate(tensors):
            if tensor is item:
                return lambda arguments, _: arguments[index]
        for index, tensor in enumerate(tensors):
            if tensor_io.buffer_of(tensor) is buffer:
                return lambda arguments, _: tensor_io.new_view(arguments[index], *geometry)
        for position, target in enumerate(self._computed):
            if target.buffer() is buffer:
                self._returned.add(position)
                if tensor_io.is_whole(item):
                    return lambda _, computed: computed[position]
                return lambda _, computed: tensor_io.new_view(computed[position], *geometry)
        return lambda *_: item  # of the state

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
        recorded, found = self._recorded, [source(arguments) for source in self._sources]
        parameters = [buffer for buffer in found if buffer is not None]
        if len(parameters) < len(found) or not _all_written(parameters):
            return None
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
        returned = {position: self._tensor(position, computed[position]) for position in self._returned}
        items = [result(tensors, returned) for result in self._results]
        return items[0] if self._structure is None else tree_unflatten(items, self._structure)

    def _tensor(self, position: int, buffer: Buffer) -> torch.Tensor:
        """A new tensor with a computed value."""
        if self._computed[position].buffer() is buffer:  # an attribute has it, too
            buffer = Buffer(buffer.spec, array=buffer.array)
        return tensor_io.tensor_over(buffer)


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
