"""Repeat a recorded call: run its program from the present values, and bind what the call binds.

What runs is what the step would have recorded: the same code, the buffers that its inputs have now, Python numbers and
random streams as they are now, and a buffer for each value that the call leaves.  It runs by the function that a flush
runs the trace by, so all that a flush does (meshes, memory, failures, waiting) is as after a recorded call.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from xla_amp.lazy.capture.recording import Origin, Recording, Source, Target
from xla_amp.lazy.capture.state import Snapshot
from xla_amp.lazy.capture.values import NotReplayableError, view
from xla_amp.lazy.graph import generator
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Buffer, Poisoned, instructions, settle
from xla_amp.lazy.programs import execute
from xla_amp.lazy.tensors import tensor_io, transfer
from xla_amp.torch_common.trees import tree_flatten, tree_unflatten
from xla_amp.training.reader import Slot


class Replay:
    """The call that two recorded calls agree on; `result` is what the later one returned."""

    def __init__(self, earlier: Recording, later: Recording, result: Any) -> None:
        difference = earlier.difference(later)
        if difference is not None:
            raise NotReplayableError(difference)
        self._recorded, run = later, later.run
        self.options = dict(earlier.options.items() & later.options.items())
        self._instructions = {node.instruction.id: node.instruction for node in nodes(run.key.code)}
        """Kept here, as the cache of programs may drop the program, which the next call then makes again."""
        sources = list(zip(run.inputs, run.held or (), strict=True))
        self._positions = [at if isinstance(at, int) and held else -1 for at, held in sources]
        """The position of each input that is held there afterwards, too; -1 for others."""
        self._special = [index for index, position in enumerate(self._positions) if position < 0]
        self._bindings = {**earlier.bindings, **later.bindings}
        loose = {source for source, held in sources if isinstance(source, int) and not held}
        self._unbound = [at for at in self._bindings if at >= later.first_gradient or at in loose - later.data]
        """The bindings whose old tensor is let go before the program runs, which may use its memory."""
        seed, offset = later.begin
        self._streams = [(None if s == seed else s, at - offset if s == seed else at) for s, at in run.streams]
        self._draws = later.end[1] - offset
        items, structure = tree_flatten(result)
        self._structure = None if len(items) == 1 and items[0] is result else structure
        self._items = [None if isinstance(item, torch.Tensor) else item for item in items]
        """What it returns and is the same in each call."""
        origins = [each for each in (*later.returned, *self._bindings.values()) if isinstance(each, Origin)]
        self._moved = {each.at for each in origins if each.at >= 0}
        made = {each.at for each in origins}
        self._loose = [each for at, each in enumerate(later.computed) if each.is_new and ~at not in made]
        """What no tensor may have after the call."""

    def _returned(self, make: Callable[[Origin], torch.Tensor]) -> Any:
        pairs = zip(self._recorded.returned, self._items, strict=True)
        items = [make(origin) if isinstance(origin, Origin) else item for origin, item in pairs]
        return items[0] if self._structure is None else tree_unflatten(items, self._structure)

    def run(self, state: Snapshot) -> tuple[Any] | None:
        """What the call returns, run again from `state`, which is released; None if a value that it needs is missing.

        Raises:
            NotReplayableError: the step keeps a tensor where a replay would not bind it.
            StepFailedError: the program failed.
        """
        if self._loose:
            self._check_holders()
        execute.flush()
        settle(filter(None, state.buffers))
        data = self._recorded.data
        slots = {at: Slot(state.at(at)[0], "data") if at in data else state.at(at)[2] for at in self._bindings}
        moved = {at: state.at(at)[0] for at in self._moved}
        parameters = self._parameters(state.buffers)
        if parameters is None or type(None) in map(type, moved.values()):
            return None
        computed = [_output(target, state.buffers) for target in self._recorded.computed]
        numbers, hosts = state.numbers, state.repeated
        counted = [*self._counted(state.by_label("counts"))] if self._recorded.counts else []
        state.release()
        for at in self._unbound:
            slots[at].put(None)
        make = _maker(moved, computed)
        try:
            execute.run_program(self._next_run(parameters, computed, numbers))
        finally:
            bound = dict[int, torch.Tensor]()
            for at, origin in self._bindings.items():
                if origin is not None:
                    bound[at] = make(origin)
            for at in data:  # also one that another one gets
                bound[at] = tensor_io.new_view(bound[at], *view(bound[at]))
            for at, tensor in bound.items():
                slots[at].put(tensor)
        for count, now in counted:
            count.fill_(now) if isinstance(count, torch.Tensor) else count.put(now)
        for owner, name in map(hosts.__getitem__, self._recorded.repeated):
            with getattr(owner, name)() or contextlib.nullcontext():
                pass
        return (self._returned(make),)

    def _counted(self, counts: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
        """The integers on the host that a call changes, each with what it is afterwards."""
        for label, each in self._recorded.counts.items():
            if each.amount:
                count = counts[label]
                yield count, int(count if isinstance(count, torch.Tensor) else count.value()) + each.amount

    def _parameters(self, buffers: Sequence[Buffer | None]) -> list[Buffer] | None:
        """The buffers of the inputs; None if one is missing, or has no value."""
        inputs = self._recorded.run.inputs
        found = [*map([*buffers, None].__getitem__, self._positions)]
        for index in self._special:
            found[index] = _input(inputs[index], buffers)
        parameters = [*filter(None, found)]
        has_all = len(parameters) == len(found) and _NO_VALUE.isdisjoint(map(type, map(_array, parameters)))
        return parameters if has_all else None

    def _next_run(self, parameters: list[Buffer], computed: list[Buffer], numbers: Sequence[Any]) -> execute.Run:
        run = self._recorded.run
        instructions.update(self._instructions)
        floats = list(run.floats)
        for index, number in self.options.items():
            floats[index] = numbers[number]
        seed, offset = generator.stream()
        streams = [(seed, offset + at) if s is None else (s, at) for s, at in self._streams]
        return execute.Run(
            key=run.key,
            parameters=parameters,
            numbers=run.numbers,
            targets=[*map(parameters.__getitem__, run.overwritten), *computed],
            overwritten=run.overwritten,
            floats=floats,
            ints=run.ints,
            streams=streams,
            draws=self._draws,
        )

    def _check_holders(self) -> None:
        """Raises, before the first replay, if an object that is no state has a tensor that the call computed."""
        loose, self._loose = self._loose, []
        if any(target.buffer() is not None for target in loose):
            gc.collect()
        if held := [target.spec for target in loose if target.buffer() is not None]:
            raise NotReplayableError(
                f"it keeps a tensor, {held[0]}, in an object that is not its state; name the object: compile(step, "
                "state=[...]), return the tensor, or copy it into one that exists"
            )


def _maker(moved: Mapping[int, Any], computed: Sequence[Buffer]) -> Callable[[Origin], torch.Tensor]:
    """A function that makes the tensors that a call binds or returns."""
    made = dict(moved)

    def make(origin: Origin) -> torch.Tensor:
        base = made.get(origin.at)
        if base is None:
            base = made[origin.at] = transfer.tensor_over(computed[~origin.at])
        return base if view(base) == origin.view and not base.requires_grad else tensor_io.new_view(base, *origin.view)

    return make


def _input(source: Source, buffers: Sequence[Buffer | None]) -> Buffer | None:
    """The buffer of an input that is a constant, or that no tensor has afterwards; None if it no longer exists."""
    if isinstance(source, weakref.ref):
        return source()
    buffer = buffers[source] if isinstance(source, int) else source
    return None if buffer is None else Buffer(buffer.spec, array=buffer.array)


def _output(target: Target, buffers: Sequence[Buffer | None]) -> Buffer:
    """The buffer that gets a value: the one at its position, another that had a value before, or a new one."""
    found = buffers[target.position] if target.position is not None else None if target.is_new else target.buffer()
    return found or Buffer(target.spec)


_array = attrgetter("array")
_NO_VALUE = frozenset((type(None), Poisoned))
