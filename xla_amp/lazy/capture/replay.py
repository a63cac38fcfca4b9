"""Repeat a recorded call: write the integers that it recorded to the trace, flush, and bind what the call binds.

The trace is what the step would have recorded: the same code, the buffers that its inputs have now, Python numbers and
random streams as they are now, and a buffer for each value that the call leaves.  So the flush finds the same program,
and everything that a flush does (meshes, memory, failures, waiting) is as after a recorded call.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from xla_amp.backends.trees import tree_flatten, tree_unflatten
from xla_amp.errors import StepFailedError
from xla_amp.lazy.capture.recording import HostValue, Recording, Source, Target, first_difference, view
from xla_amp.lazy.capture.state import Snapshot
from xla_amp.lazy.capture.values import NotReplayableError, put
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Buffer, Poisoned, trace
from xla_amp.lazy.programs import execute, memory_layout
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import generator

Result: TypeAlias = Callable[[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]], Any]
"""Gives an item that a call returns from tensors by position and the values that it computed."""


class Replay:
    """The call that two recorded calls agree on.

    Args:
        earlier, later: the two calls.
        result: what the later one returned.
        arguments: its tensor arguments.
        after: the snapshot after it.

    Raises:
        NotReplayableError: they differ, or an input is neither an argument, nor state, nor the same in both calls.
    """

    def __init__(
        self, earlier: Recording, later: Recording, result: Any, arguments: list[torch.Tensor], after: Snapshot
    ) -> None:
        difference = first_difference(earlier, later)
        if difference is not None:
            raise NotReplayableError(f"its calls differ: {difference}")
        for old, new in zip(earlier.sources, later.sources, strict=True):
            if isinstance(new, str):
                raise NotReplayableError(new)
            if isinstance(new, int) and old != new:
                raise NotReplayableError("its calls read different tensors of its state in the same operations")
        if earlier.bound() != later.bound():
            raise NotReplayableError("its calls bind different tensors of its state")
        self.options = _options(earlier, later)
        """Which lifted floats are options of optimizers: the options, which have the same value."""
        self._floats = [(index, min(options)) for index, options in self.options.items()]
        self._recorded = later
        pairs = list(zip(later.sources, later.held, strict=True))
        self._positions = [at if isinstance(at, int) and at >= 0 and held else None for at, held in pairs]
        """The position of each input that is held there afterwards, too."""
        self._special = [slot for slot, position in enumerate(self._positions) if position is None]
        self._computed = later.targets[later.overwritten :]
        dropped = dict.fromkeys(each for each in (*earlier.bindings, *later.bindings) if each.source is None)
        self._bindings = [*later.bound(), *dropped]
        loose = {source for source, held in pairs if not held}
        self._unbound = [at for at, each in enumerate(self._bindings) if each.position < 0 or each.position in loose]
        """The bindings whose old tensor is let go before the program runs, which may use its memory."""
        sources = [each.source for each in self._bindings if each.source is not None]
        self._moved = [index for kind, index in sources if kind == "moved"]
        self._kept = {index - later.overwritten for kind, index in sources if kind == "computed"}
        """Which of the computed values the state has afterwards."""
        seed, offset = later.begin
        self._streams = [(None if s == seed else s, at - offset if s == seed else at) for s, at in later.streams]
        self._draws = later.end[1] - offset
        items, structure = tree_flatten(result)
        self._structure = None if len(items) == 1 and items[0] is result else structure
        self._returned: set[int] = set()
        """Which of the computed values it returns."""
        self._shown: set[int] = set()
        """Positions that it returns."""
        self._results = [self._result(item, [*arguments, *(each.tensor for each in after.tensors)]) for item in items]
        self._checked = False
        self._others: set[int] = set()
        """Which of the computed values an object that is no state holds."""
        self._earlier = [target.buffer for target in earlier.targets[earlier.overwritten :]]

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
        buffer, geometry = tensor_io.buffer_of(item), view(item)
        for index, each in enumerate(self._computed):
            if each.position is None and each.buffer() is buffer:
                self._returned.add(index)
                if tensor_io.is_whole(item):
                    return lambda _, computed: computed[index]
                return lambda _, computed: tensor_io.new_view(computed[index], *geometry)
        same = [position for position, tensor in enumerate(tensors) if tensor_io.buffer_of(tensor) is buffer]
        if not same:
            return lambda *_: item  # the same in each call
        position = next((each for each in same if view(tensors[each]) == geometry), same[0])
        self._shown.add(position)
        if view(tensors[position]) == geometry:
            return lambda shown, _: shown[position]
        return lambda shown, _: tensor_io.new_view(shown[position], *geometry)

    # -- replaying -----------------------------------------------------------------------------------------------

    def run(self, arguments: list[torch.Tensor], state: Snapshot) -> tuple[Any] | None:
        """Runs the call again; the caller holds the trace's lock.

        Args:
            arguments: tensor arguments.
            state: the snapshot before the call, which is released.

        Returns:
            What the call returns; None if a value that it needs does not exist.

        Raises:
            NotReplayableError: the step keeps a tensor where a replay would not bind it.
            StepFailedError: the program failed, or a value was lost in a failed step.
        """
        if not self._checked:
            self._find_others()
        execute.flush()
        count = len(arguments)
        owners = [_owner(each.position, count, state) for each in self._bindings]
        shown = {at: arguments[at] if at < count else state.tensors[at - count].tensor for at in self._shown}
        moved = {at: _tensor_at(at, arguments, state) for at in self._moved}
        computed = self._fill(state, owners)
        if computed is None:
            return None
        try:
            seed, offset = generator.state()
            execute.flush(self._recorded.spent)
            if self._draws:
                generator.set_state(seed, offset + self._draws)
        finally:
            made: dict[int, torch.Tensor] = {}
            for each, owner in zip(self._bindings, owners, strict=True):
                if each.source is not None:
                    kind, index = each.source
                    new = moved[index] if kind == "moved" else made.get(index)
                    if new is None:
                        new = made[index] = tensor_io.tensor_over(computed[index - self._recorded.overwritten])
                    if kind == "computed" and each.geometry is not None:
                        new = tensor_io.new_view(new, *each.geometry)
                    _bind(owner, new)
        return (self._finish(shown, computed),)

    def recorded_result(self, arguments: list[torch.Tensor], after: Snapshot) -> Any:
        """The result of the recorded call, made as a replay makes it: the step keeps no other object.

        Args:
            arguments: tensor arguments.
            after: the snapshot after the call.
        """
        tensors = [*arguments, *(each.tensor for each in after.tensors)]
        computed = [each.buffer() or Buffer(each.spec) for each in self._computed]
        copies = [Buffer(each.spec, array=each.array) for each in computed]
        return self._finish({position: tensors[position] for position in self._shown}, copies)

    def _finish(self, shown: Mapping[int, torch.Tensor], computed: list[Buffer]) -> Any:
        returned = {index: self._tensor(index, computed[index]) for index in self._returned}
        items = [result(shown, returned) for result in self._results]
        return items[0] if self._structure is None else tree_unflatten(items, self._structure)

    def _fill(self, state: Snapshot, owners: list[Any]) -> list[Buffer] | None:
        """Writes the call to the empty trace; returns the buffers of what it computes.

        A separate function: a variable that holds a parameter at the flush would count as a tensor that does.
        """
        recorded = self._recorded
        buffers = state.buffers
        found = [None if at is None else buffers[at] for at in self._positions]
        for slot in self._special:
            found[slot] = _input(recorded.sources[slot], recorded.held[slot], state)
        parameters = [buffer for buffer in found if buffer is not None]
        if len(parameters) < len(found) or not _all_written(parameters):
            return None
        computed = [_output(target, state, at in self._others) for at, target in enumerate(self._computed)]
        for buffer, target in zip(computed, self._computed, strict=True):
            buffer.number = target.number
        floats = list(recorded.floats)
        for index, number in self._floats:
            floats[index] = state.numbers[number]
        state.release()
        for at in self._unbound:
            _bind(owners[at], None)
        del found, buffers
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

    def _tensor(self, index: int, buffer: Buffer) -> torch.Tensor:
        """A new tensor with a computed value."""
        if (
            index in self._kept or index in self._others or not self._computed[index].is_new
        ):  # another tensor has it, too
            buffer = Buffer(buffer.spec, array=buffer.array)
        return tensor_io.tensor_over(buffer)

    def _find_others(self) -> None:
        """Finds which of the computed values an object that is no state holds: it gets those of each replay, too."""
        self._checked = True
        loose = [at for at, each in enumerate(self._computed) if each.is_new and at not in self._kept]
        if any(self._computed[at].buffer() is not None for at in loose):
            gc.collect()
        self._others = {at for at in loose if self._computed[at].buffer() is not None}
        for at in self._others:
            if self._earlier[at]() is not None:
                raise NotReplayableError(
                    f"it keeps a tensor, {self._computed[at].spec}, beside the one of the call before, in an object "
                    "that is not its state; name the object: compile(step, state=[...]), return the "
                    "tensor, or copy it into one that exists"
                )


def _options(earlier: Recording, later: Recording) -> dict[int, frozenset[int]]:
    """Which lifted floats are options of optimizers.

    Raises:
        NotReplayableError: another one has changed.
    """
    found: dict[int, frozenset[int]] = {}
    names = [node.instruction.name for node in nodes(later.code) for _ in range(node.instruction.floats)]
    for index, (old, new) in enumerate(zip(earlier.floats, later.floats, strict=True)):
        common = earlier.numbers.get(index, frozenset()) & later.numbers.get(index, frozenset())
        if common:
            found[index] = common
        elif old != new or math.isnan(new):
            raise NotReplayableError(
                f"Python computes {new!r} for {names[index]}, a number that changes from call to call ({old!r} "
                "before); keep it in a tensor on the device, or pass it as one"
            )
    return found


def _owner(position: int, count: int, state: Snapshot) -> Any:
    """Where a tensor is bound: a parameter for its gradient, or a place."""
    return state.parameters[~position] if position < 0 else state.tensors[position - count].place


def _tensor_at(position: int, arguments: list[torch.Tensor], state: Snapshot) -> torch.Tensor | None:
    if position < 0:
        return state.gradients[~position]
    count = len(arguments)
    return arguments[position] if position < count else state.tensors[position - count].tensor


def _bind(owner: Any, tensor: torch.Tensor | None) -> None:
    if isinstance(owner, torch.Tensor):
        owner.grad = tensor
    else:
        put(owner, tensor)


def _at(position: int, state: Snapshot) -> Buffer | None:
    if position >= 0:
        return state.buffers[position]
    gradient = state.gradients[~position]
    return None if gradient is None else tensor_io.buffer_of(gradient)


def _input(source: Source, held: bool, state: Snapshot) -> Buffer | None:
    """The buffer of an input; None if it no longer exists."""
    if isinstance(source, int):
        buffer = _at(source, state)
        return buffer if held or buffer is None else Buffer(buffer.spec, array=buffer.array)
    if isinstance(source, HostValue):
        return Buffer(source.spec, array=source.array)
    assert isinstance(source, weakref.ref)  # noqa: S101  (the constructor refuses texts)
    return source()


def _output(target: Target, state: Snapshot, shared: bool) -> Buffer:
    """The buffer that gets a value: the one at its position, one that another object has (`shared`), or a new one."""
    if target.position is not None:
        return _at(target.position, state) or Buffer(target.spec)
    return (target.buffer() if shared or not target.is_new else None) or Buffer(target.spec)


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
