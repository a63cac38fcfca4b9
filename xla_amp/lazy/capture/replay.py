"""Repeat a recorded call: write the integers that it recorded to the trace, flush, and bind what the call binds.

The trace is what the step would have recorded: the same code, the buffers that its inputs have now, Python numbers and
random streams as they are now, and a buffer for each value that the call leaves.  So the flush finds the same program,
and everything that a flush does (meshes, memory, failures, waiting) is as after a recorded call.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from xla_amp.backends.trees import tree_flatten, tree_unflatten
from xla_amp.errors import StepFailedError
from xla_amp.lazy.capture.recording import HostValue, Origin, Recording, Source, Target
from xla_amp.lazy.capture.state import Snapshot
from xla_amp.lazy.capture.values import Keys, NotReplayableError, put, view
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Buffer, Poisoned, instructions, trace
from xla_amp.lazy.programs import execute, memory_layout
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import generator


class Replay:
    """The call that two recorded calls agree on.

    Args:
        earlier, later: the two calls.
        result: what the later one returned.

    Raises:
        NotReplayableError: they differ, or the result cannot be made again.
    """

    def __init__(self, earlier: Recording, later: Recording, result: Any) -> None:
        difference = earlier.difference(later)
        if difference is not None:
            raise NotReplayableError(difference)
        self.options = earlier.options(later)
        self._floats = [(index, min(options)) for index, options in self.options.items()]
        self._recorded = later
        self._instructions = {node.instruction.id: node.instruction for node in nodes(later.code)}
        """Kept here, as the cache of programs may drop the program, which the next call then makes again."""
        pairs = list(zip(later.sources, later.held, strict=True))
        self._positions = [at if isinstance(at, int) and held else None for at, held in pairs]
        """The position of each input that is held there afterwards, too."""
        self._special = [slot for slot, position in enumerate(self._positions) if position is None]
        self._computed = later.targets[later.overwritten :]
        self._bindings = {**earlier.bindings, **later.bindings}
        loose = {source for source, held in pairs if isinstance(source, int) and not held}
        self._unbound = [at for at in self._bindings if at >= later.first_gradient or at in loose]
        """The bindings whose old tensor is let go before the program runs, which may use its memory."""
        seed, offset = later.begin
        self._streams = [(None if s == seed else s, at - offset if s == seed else at) for s, at in later.streams]
        self._draws = later.end[1] - offset
        self._items, structure = tree_flatten(result)
        self._structure = None if len(self._items) == 1 and self._items[0] is result else structure
        self._origins = [self._origin(item) for item in self._items]
        """Of what it returns; None for what is the same in each call."""
        origins = [each for each in (*self._origins, *self._bindings.values()) if each is not None]
        self._moved = {each.position for each in origins if each.position is not None}
        bound = {each.computed for each in self._bindings.values() if each is not None}
        self._shared = {at for at, each in enumerate(self._computed) if at in bound or not each.is_new}
        """Which of the computed values other tensors have beside those that it returns."""
        self._earlier = earlier.targets[earlier.overwritten :]
        self._loose = [at for at, each in enumerate(self._computed) if each.is_new and at not in bound]

    def _origin(self, item: Any) -> Origin | None:
        if not isinstance(item, torch.Tensor):
            return None
        if item.device.type != DEVICE_TYPE or item.layout is not torch.strided:
            raise NotReplayableError(
                f"it returns a tensor on {item.device} ({item.layout}), which a replay would not compute; return a "
                f"dense tensor on {DEVICE_TYPE!r}"
            )
        if item.is_conj() or item.is_neg():
            raise NotReplayableError("it returns a view that is conjugated or negated; call resolve_conj() on it")
        return self._recorded.origin(item)

    def run(self, state: Snapshot) -> tuple[Any] | None:
        """Runs the call again; the caller holds the trace's lock.

        Args:
            state: the snapshot before the call, which is released.

        Returns:
            What the call returns; None if a value that it needs does not exist.

        Raises:
            NotReplayableError: the step keeps a tensor where a replay would not bind it.
            StepFailedError: the program failed, or a value was lost in a failed step.
        """
        self._find_holders()
        execute.flush()
        places = {at: state.place(at) for at in self._bindings}
        tensors = ((at, state.tensor(at)) for at in self._moved)
        moved: dict[int | None, torch.Tensor] = {at: tensor for at, tensor in tensors if tensor is not None}
        computed = self._fill(state, places) if len(moved) == len(self._moved) else None
        if computed is None:
            return None
        try:
            seed, offset = generator.state()
            execute.flush(self._recorded.spent)
            if self._draws:
                generator.set_state(seed, offset + self._draws)
        finally:
            made: dict[int, torch.Tensor] = {}
            for at, origin in self._bindings.items():
                if origin is not None:
                    put(places[at], _tensor(origin, moved, made, computed))
        return (self._result(moved, computed),)

    def recorded_result(self) -> Any:
        """The result of the recorded call, made as a replay makes it: the step keeps no other object."""
        computed = [each.buffer() or Buffer(each.spec) for each in self._computed]
        moved = {origin.position: item for origin, item in zip(self._origins, self._items, strict=True) if origin}
        result = self._result(moved, [Buffer(each.spec, array=each.array) for each in computed])
        self._items = [
            item if origin is None else None for origin, item in zip(self._origins, self._items, strict=True)
        ]
        return result

    def _result(self, moved: Mapping[int | None, torch.Tensor], computed: list[Buffer]) -> Any:
        made: dict[int, torch.Tensor] = {}
        own = [Buffer(each.spec, array=each.array) if at in self._shared else each for at, each in enumerate(computed)]
        pairs = zip(self._origins, self._items, strict=True)
        items = [item if origin is None else _tensor(origin, moved, made, own) for origin, item in pairs]
        return items[0] if self._structure is None else tree_unflatten(items, self._structure)

    def _fill(self, state: Snapshot, places: dict[int, Keys]) -> list[Buffer] | None:
        """Writes the call to the empty trace; returns the buffers of what it computes.

        A separate function: a variable that holds a parameter at the flush would count as a tensor that does.
        """
        recorded, buffers = self._recorded, state.buffers
        found = [None if at is None else buffers[at] for at in self._positions]
        for slot in self._special:
            found[slot] = _input(recorded.sources[slot], recorded.held[slot], buffers)
        parameters = [buffer for buffer in found if buffer is not None]
        if len(parameters) < len(found) or not _all_written(parameters):
            return None
        computed = [_output(target, buffers) for target in self._computed]
        floats = list(recorded.floats)
        for index, number in self._floats:
            floats[index] = state.numbers[number]
        state.release()
        for at in self._unbound:
            put(places[at], None)
        del found, buffers
        _unshare([parameters[slot] for slot in recorded.donated])
        for buffer, number in zip(parameters, recorded.final_numbers, strict=True):
            buffer.number = number
        trace.parameters.extend(parameters)
        trace.parameter_numbers.extend(recorded.parameter_numbers)
        trace.computed.extend(map(weakref.ref, computed))
        instructions.update(self._instructions)
        trace.code.extend(recorded.code)
        trace.count = recorded.count
        trace.floats.extend(floats)
        trace.ints.extend(recorded.ints)
        seed, offset = generator.state()
        trace.streams.extend((seed, offset + at) if s is None else (s, at) for s, at in self._streams)
        return computed

    def _find_holders(self) -> None:
        """Finds, before the first replay, what an object that is no state holds: it gets the values of replays, too."""
        loose, self._loose = self._loose, []
        if any(self._computed[at].buffer() is not None for at in loose):
            gc.collect()
        for at in loose:
            target = self._computed[at]
            if target.buffer() is None:
                continue
            if self._earlier[at].buffer() is not None:
                raise NotReplayableError(
                    f"it keeps a tensor, {target.spec}, beside the one of the call before, in an object that is not "
                    "its state; name the object: compile(step, state=[...]), return the tensor, or copy it into one "
                    "that exists"
                )
            self._computed[at] = target._replace(is_new=False)
            self._shared.add(at)


def _tensor(
    origin: Origin, moved: Mapping[int | None, torch.Tensor], made: dict[int, torch.Tensor], computed: list[Buffer]
) -> torch.Tensor:
    """The tensor that a call binds or returns."""
    index = origin.computed
    if index is not None and index not in made:
        made[index] = tensor_io.tensor_over(computed[index])
    base = moved[origin.position] if index is None else made[index]
    return base if view(base) == origin.view and not base.requires_grad else tensor_io.new_view(base, *origin.view)


def _input(source: Source, held: bool, buffers: Sequence[Buffer | None]) -> Buffer | None:
    """The buffer of an input; None if it no longer exists."""
    if isinstance(source, weakref.ref):
        return source()
    if isinstance(source, int):
        buffer = buffers[source]
        return buffer if held or buffer is None else Buffer(buffer.spec, array=buffer.array)
    assert isinstance(source, HostValue)  # noqa: S101  (a replay has no input without a source)
    return Buffer(source.spec, array=source.array)


def _output(target: Target, buffers: Sequence[Buffer | None]) -> Buffer:
    """The buffer that gets a value: the one at its position, another that had a value before, or a new one."""
    found = buffers[target.position] if target.position is not None else None if target.is_new else target.buffer()
    buffer = found or Buffer(target.spec)
    buffer.number = target.number
    return buffer


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
