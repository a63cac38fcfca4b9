"""Record one call of a step: the program that it ran, and where each of its inputs came from.

If two calls in a row ran one program each, and the same one, then the program of a third call is known up to its data:
arguments, state, Python numbers and the random state.  `replay` runs it again.  Nothing here depends on optimizers or
modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import torch

from xla_amp.common import events
from xla_amp.lazy.capture.numbers import CallNumbers
from xla_amp.lazy.capture.reach import NotReplayableError
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.graph.trace import Spec, trace
from xla_amp.lazy.programs import execute, recompile_reasons
from xla_amp.lazy.programs.compile import XlaProgram
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.torch_integration import generator

Reference: TypeAlias = "weakref.ref[Buffer]"


Source: TypeAlias = "Callable[[Sequence[Buffer]], Buffer | None] | str"
"""Gives an input of a replay from the buffers of its tensor arguments, None if it no longer exists; or why none can."""


class Target(NamedTuple):
    """A value that a call leaves in a buffer."""

    buffer: Reference
    spec: Spec
    number: int
    argument: int | None
    """Index of the tensor argument that has the buffer."""
    is_new: bool
    """Whether the buffer had no value before."""


class Recording:
    """Context manager around a call: the program that runs inside, as the trace held it when it was flushed.

    Args:
        numbers: follows what optimizers do in the call.
        tensors: tensor arguments of the call.
        gradients: `Guards.gradients` before the call.
        previous: the call before.
    """

    begin: tuple[int, int]
    """(seed, offset) of the random generator at the beginning of the call."""
    end: tuple[int, int]
    code: tuple[int, ...]
    count: int
    ints: list[int]
    streams: list[tuple[int, int]]
    parameters: list[Reference]
    parameter_numbers: list[int]
    final_numbers: list[int]
    """Number of the value that each parameter has at the end."""
    sources: list[Source]
    """Of each parameter."""
    host_arrays: dict[int, jax.Array]
    """Arrays of parameters that no tensor holds after the call and that were neither arguments nor carried."""
    overwritten: int
    """How many they are."""
    program: weakref.ref[XlaProgram]
    spent: tuple[int, ...]
    """Parameters whose arrays the program may take."""
    donated: tuple[int, ...]
    """Those whose memory it takes."""

    plain: list[Any]
    """An entry for each Python value that the call returned."""

    def __init__(
        self,
        numbers: CallNumbers,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[Reference | None],
        previous: Recording | None,
    ) -> None:
        self.numbers, self.gradients, self._previous = numbers, gradients, previous
        execute.flush()
        self._argument_of = {id(tensor_io.buffer_of(tensor)): index for index, tensor in enumerate(tensors)}
        self._locations: list[str] = []
        """Where the user's code ended each program."""
        self._generators = False
        self.targets: list[Target] = []
        """Parameters that the call overwrites come first."""

    def __enter__(self) -> Recording:
        self.begin = generator.state()
        self._counts = metrics.host_syncs, generator.seedings
        execute.flush_begins.subscribe(self.before)
        execute.flush_ends.subscribe(self.after)
        return self

    def __exit__(self, *_: Any) -> None:
        execute.flush_begins.unsubscribe(self.before)
        execute.flush_ends.unsubscribe(self.after)
        self._previous = None
        self.end = generator.state()
        self._reads, self._seedings = metrics.host_syncs - self._counts[0], generator.seedings - self._counts[1]

    def before(self, parameters: list[Buffer], held: list[bool]) -> None:
        """Called before a program runs.  Arrays from the host are kept, so that no program takes their memory."""
        self._locations.append(events.user_location())
        self._generators = self._generators or bool(trace.generators)
        self.numbers.resolve(trace.floats)
        self.host_arrays = {}
        before = () if self._previous is None else self._previous.targets
        carried = {id(found): index for index, target in enumerate(before) if (found := target.buffer()) is not None}
        self.sources = [
            self._source(slot, buffer, carried.get(id(buffer)), held[slot]) for slot, buffer in enumerate(parameters)
        ]

    def _source(self, slot: int, buffer: Buffer, carried: int | None, held: bool) -> Source:
        if (index := self._argument_of.get(id(buffer))) is not None:
            return itemgetter(index)
        earlier, reference = self._previous, weakref.ref(buffer)
        if earlier is not None and slot < len(earlier.parameters) and earlier.parameters[slot]() is buffer:
            return lambda _: reference()  # the same in each call
        if carried is not None:  # the call before computed it, so a replay reads what this call leaves
            targets = self.targets
            return lambda _: _with_value_of(targets[carried].buffer())
        if held or not isinstance(buffer.array, jax.Array):
            return (
                f"it reads a tensor, {buffer.spec}, that is another one in each call and no argument; pass it as an "
                "argument"
            )
        spec = buffer.spec
        array = self.host_arrays[slot] = buffer.array
        old = None if earlier is None else earlier.host_arrays.get(slot)
        if old is not None and _same(old, array):
            return lambda _: Buffer(spec, array=array)
        return (
            f"it brings a value from the host, {spec}, that is another in each call; make it a tensor on the device "
            "outside and pass it as an argument"
        )

    def after(self, program: XlaProgram, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """Called after `program` was dispatched."""
        self.program, self.spent, self.donated = weakref.ref(program), program.key.spent, program.donated
        self.code, self.count = code, trace.count
        self.ints = list(trace.ints)
        self.streams = list(trace.streams) or [generator.stream()]
        self.parameters = [weakref.ref(buffer) for buffer in trace.parameters]
        self.parameter_numbers = list(trace.parameter_numbers)
        self.final_numbers = [buffer.number for buffer in trace.parameters]
        self.targets[:] = [
            Target(weakref.ref(each), each.spec, each.number, self._argument_of.get(id(each)), each.array is None)
            for each in targets
        ]
        parameters = set(map(id, trace.parameters))
        self.overwritten = sum(id(each) in parameters for each in targets)

    def has_written(self, tensor: torch.Tensor | None) -> bool:
        """Whether the call computed the value of a tensor."""
        if tensor is None or tensor.layout is not torch.strided:
            return tensor is not None
        buffer = tensor_io.buffer_of(tensor)
        return any(target.buffer() is buffer for target in self.targets)

    def require_one_program(self) -> None:
        """Checks that a replay can do what the call did.

        Raises:
            NotReplayableError: there was no program, or more than one, or Python read a value or seeded the generator,
                or an optimizer computed on the host.
        """
        if self.numbers.obstacle is not None:
            raise NotReplayableError(self.numbers.obstacle)
        if not self._locations:
            raise NotReplayableError("it records nothing on the lazy device")
        location = self._locations[0]
        if self._reads:
            raise NotReplayableError(
                f"it reads a value on the host at {location} (item(), print, an `if` on a tensor, or a result whose "
                "size depends on data)"
            )
        if len(self._locations) > 1:
            raise NotReplayableError(f"it ends a step at {location}, so it is more than one program")
        if self._generators:
            raise NotReplayableError("it draws from a torch.Generator; draw from the device's own (leave it out)")
        if self._seedings or self.begin[0] != self.end[0]:
            raise NotReplayableError("it seeds the random generator; seed it outside")


def require_replaced(earlier: Recording, later: Recording, storages: Sequence[int]) -> None:
    """Checks that the step keeps no tensor which `earlier` computed beside the one of `later`.

    A replay writes each value where the call before has left its own.

    Args:
        earlier, later: two calls in a row.
        storages: the ids of buffers that the step can see after `later`.

    Raises:
        NotReplayableError: it keeps one.
    """
    replaced = {id(target.buffer()) for target in later.targets}
    kept = set(storages) - replaced
    for target in earlier.targets:
        if (buffer := target.buffer()) is not None and id(buffer) in kept:
            raise NotReplayableError(
                f"it keeps a tensor, {target.spec}, that the call before computed, and computes another one; write "
                "both into tensors that exist (`kept.copy_(last)`)"
            )


def first_difference(one: Recording, other: Recording) -> str | None:
    """A description of the first difference of two calls' operations, whole numbers and values kept; None if none."""
    if one.code != other.code:
        return recompile_reasons.difference(one.code, other.code) or "another operation"
    if one.ints != other.ints:
        change = next(f"{a} in one, {b} in the next" for a, b in zip(one.ints, other.ints, strict=True) if a != b)
        return f"whole numbers in it change from call to call: {change}"
    if [target.number for target in one.targets] != [target.number for target in other.targets]:
        return (
            "the same operations keep other values alive from call to call (a list that grows? gradients not dropped?)"
        )
    return None


def _with_value_of(buffer: Buffer | None) -> Buffer | None:
    """A new buffer with the value that `buffer` has now, since the call binds another and does not overwrite it."""
    return None if buffer is None else Buffer(buffer.spec, array=buffer.array)


def _same(one: jax.Array, other: jax.Array) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
