"""Record one call of a step: the program that it ran, and where its inputs came from and its results went.

An input is a tensor argument or a tensor of the state, known by its position; or a tensor that is the same one in each
call; or a value that the host brought, the same in each call.  A result goes to an argument, to a position of the state
(`Binding`), or is returned.  If two calls agree, the program of a third one is known up to its data.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from xla_amp.common import events
from xla_amp.lazy.capture.state import Snapshot, State
from xla_amp.lazy.capture.values import NotReplayableError
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Buffer, Spec, trace
from xla_amp.lazy.programs import execute, recompile_reasons
from xla_amp.lazy.programs.compile import XlaProgram
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import generator

Reference: TypeAlias = "weakref.ref[Buffer]"


class HostValue(NamedTuple):
    """A value that the host brings, the same in each call."""

    spec: Spec
    array: jax.Array


Source: TypeAlias = "int | Reference | HostValue | str"
"""An input: its position, a buffer that is the same in each call, a value from the host; or why a replay has none.

A position counts tensor arguments and tensors of the state; ~n is the gradient of the n-th parameter.
"""


class Target(NamedTuple):
    """A value that a call leaves in a buffer."""

    buffer: Reference
    spec: Spec
    number: int
    position: int | None
    """Of the argument or tensor of the state that had this buffer before the call, too."""
    is_new: bool
    """Whether the buffer had no value before."""


class Binding(NamedTuple):
    """A position that has another tensor after the call than before."""

    position: int
    source: tuple[str, int] | None
    """("computed", index of a target) or ("moved", position before the call); None if a gradient was dropped."""
    geometry: tuple[Any, ...] | None
    """Dtype, shape, strides and offset; None for all of the buffer."""


class Recording:
    """Context manager around a call.

    Args:
        state: of the step; learns which models and optimizers the call uses.
        before: its snapshot, which is released.
        previous: the last call of the same kind.
    """

    code: tuple[int, ...]
    count: int
    floats: list[float]
    ints: list[int]
    streams: list[tuple[int, int]]
    end: tuple[int, int]
    parameters: list[Reference]
    parameter_numbers: list[int]
    final_numbers: list[int]
    """Number of the value that each parameter has at the end."""
    held: list[bool]
    """Which parameters some tensor has at the end."""
    sources: list[Source]
    """Of each parameter."""
    overwritten: int
    """How many targets are parameters; they come first."""
    program: weakref.ref[XlaProgram]
    spent: tuple[int, ...]
    """Parameters whose arrays the program may take."""
    donated: tuple[int, ...]
    """Those whose memory it takes."""
    plain: list[Any]
    """An entry for each Python value that the call returned."""

    def __init__(self, state: State, before: Snapshot, previous: Recording | None) -> None:
        self._state, self._previous = state, previous
        self.had, self.had_numbers = before.start()
        self.options = before.options
        execute.flush()
        self._positions: dict[Reference, int] = {}
        for number, gradient in enumerate(before.gradients):
            if gradient is not None and gradient.layout is torch.strided and gradient.device.type == DEVICE_TYPE:
                self._positions[weakref.ref(tensor_io.buffer_of(gradient))] = ~number
        self._places = list(map(weakref.ref, before.buffers))
        for position in range(len(self._places) - 1, -1, -1):
            self._positions[self._places[position]] = position
        self.targets: list[Target] = []
        self.bindings: list[Binding] = []
        self.reads: dict[int, bool] = {}
        """Gradients whose presence before the call matters -> whether there was one."""
        self.numbers: dict[int, frozenset[int]] = {}
        """Index of each lifted float that is an option of an optimizer -> the options with its value."""
        self.writes_gradients = False
        self._locations: list[str] = []
        """Where the user's code ended each program."""
        self._generators = False
        self._ranges: list[tuple[Optimizer, int, int]] = []
        """Optimizers that stepped, and which lifted floats they recorded."""
        self._obstacle: str | None = None
        before.release()
        state.forget()

    def __enter__(self) -> Recording:
        self.begin = generator.state()
        self._counts = metrics.host_syncs, generator.seedings
        execute.flush_begins.subscribe(self._before)
        execute.flush_ends.subscribe(self._after)
        self._hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._calls),
            register_optimizer_step_pre_hook(self._steps),
            register_optimizer_step_post_hook(self._stepped),
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        execute.flush_begins.unsubscribe(self._before)
        execute.flush_ends.unsubscribe(self._after)
        self._previous = None
        self.end = generator.state()
        self._reads, self._seedings = metrics.host_syncs - self._counts[0], generator.seedings - self._counts[1]

    # -- during the call -----------------------------------------------------------------------------------------

    def _calls(self, module: torch.nn.Module, _: Any) -> None:
        self._state.saw(module)

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        self._state.saw(optimizer)
        self._obstacle = self._obstacle or _host_state(optimizer)
        self._ranges.append((optimizer, len(trace.floats), len(trace.floats)))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._obstacle = self._obstacle or _host_state(optimizer)
        if self._ranges and self._ranges[-1][0] is optimizer:
            self._ranges[-1] = optimizer, self._ranges[-1][1], len(trace.floats)

    def _before(self, parameters: list[Buffer], held: list[bool]) -> None:
        """Before a program runs.  Arrays from the host are kept, so that no program takes their memory."""
        self._locations.append(events.user_location())
        self._generators = self._generators or bool(trace.generators)
        self.floats, self.held = list(trace.floats), list(held)
        self.sources = [self._source(slot, buffer, held[slot]) for slot, buffer in enumerate(parameters)]

    def _source(self, slot: int, buffer: Buffer, held: bool) -> Source:
        reference, earlier = weakref.ref(buffer), self._previous
        if (position := self._positions.get(reference)) is not None:
            return position
        old = None if earlier is None or slot >= len(earlier.sources) else earlier.sources[slot]
        if held or not isinstance(buffer.array, jax.Array):
            if earlier is not None and slot < len(earlier.parameters) and earlier.parameters[slot] == reference:
                return reference
            return (
                f"it reads a tensor, {buffer.spec}, that is another one in each call, no argument and no state; "
                "pass it as an argument, or name the object that holds it: compile(step, state=[...])"
            )
        if earlier is None or (isinstance(old, HostValue) and _same(old.array, buffer.array)):
            return HostValue(buffer.spec, buffer.array)
        return (
            f"it brings a value from the host, {buffer.spec}, that is another in each call; make it a tensor on the "
            "device outside and pass it as an argument"
        )

    def _after(self, program: XlaProgram, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """After `program` was dispatched."""
        self.program, self.spent, self.donated = weakref.ref(program), program.key.spent, program.donated
        self.code, self.count, self.ints = code, trace.count, list(trace.ints)
        self.streams = list(trace.streams) or [generator.stream()]
        self.parameters = [weakref.ref(buffer) for buffer in trace.parameters]
        self.parameter_numbers = list(trace.parameter_numbers)
        self.final_numbers = [buffer.number for buffer in trace.parameters]
        for each in targets:
            reference = weakref.ref(each)
            position = self._positions.get(reference)
            self.targets.append(Target(reference, each.spec, each.number, position, each.array is None))
        parameters = set(map(id, trace.parameters))
        self.overwritten = sum(id(each) in parameters for each in targets)

    # -- after it ------------------------------------------------------------------------------------------------

    def bound(self) -> list[Binding]:
        """The bindings to a tensor; that a gradient was dropped depends on whether there was one."""
        return [each for each in self.bindings if each.source is not None]

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self._ranges)

    def require_one_program(self) -> None:
        """Checks that a replay can do what the call did.

        Raises:
            NotReplayableError: there was no program, or more than one, or Python read a value or seeded the generator,
                or an optimizer computed on the host.
        """
        if self._obstacle is not None:
            raise NotReplayableError(self._obstacle)
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

    def resolve(self, after: Snapshot) -> None:
        """Finds where results went, which gradients matter, and which numbers are options of optimizers.

        Args:
            after: the snapshot after the call, equal to the one before in all that is compared.

        Raises:
            NotReplayableError: the call binds what a replay cannot.
        """
        found = {target.buffer: index for index, target in enumerate(self.targets)}
        count = len(after.arguments)
        for position in range(count, len(after.buffers)):
            each = after.tensors[position - count]
            self._bind(position, each.tensor, self._places[position], found, each.label)
        of_gradients = {~position: buffer for buffer, position in self._positions.items() if position < 0}
        read = {~source for source in self.sources if isinstance(source, int) and source < 0}
        for number, (gradient, had) in enumerate(zip(after.gradients, self.had, strict=True)):
            before = of_gradients.get(number)
            kept = self._bind(~number, gradient, before, found, "a gradient")
            touched = before in found if kept else not had
            if number in read or touched or not (had or gradient is not None):
                self.reads[number] = had
        written = [*(target.position for target in self.targets), *(each.position for each in self.bindings)]
        self.writes_gradients = any(position is not None and position < 0 for position in written)
        self._match_numbers()

    def _bind(
        self,
        position: int,
        tensor: torch.Tensor | None,
        before: Reference | None,
        found: dict[Reference, int],
        label: str,
    ) -> bool:
        """Notes what is at a position now; returns whether it is what was there before."""
        if tensor is None:
            if before is not None:
                self.bindings.append(Binding(position, None, None))
            return before is None
        if tensor.layout is not torch.strided:
            raise NotReplayableError(f"it leaves a sparse tensor as {label}; drop it inside (zero_grad())")
        reference = weakref.ref(tensor_io.buffer_of(tensor))
        if reference == before:
            return True
        if tensor.requires_grad:
            raise NotReplayableError(f"it binds {label} to a tensor that requires grad; bind tensor.detach()")
        index, moved = found.get(reference), self._positions.get(reference)
        if moved is None and (index is None or index < self.overwritten):
            raise NotReplayableError(f"it binds {label} to a tensor that it neither computes nor finds in its state")
        source = ("moved", moved) if moved is not None else ("computed", index or 0)
        self.bindings.append(Binding(position, source, None if tensor_io.is_whole(tensor) else view(tensor)))
        return False

    def _match_numbers(self) -> None:
        """Finds the lifted floats that the kernels of sync-free optimizers take, by their values."""
        ranges = [each for each in self._ranges if getattr(each[0], "numbers_are_inputs", False)]
        for node in nodes(self.code) if ranges else ():
            if not node.instruction.name.startswith("_fused_"):
                continue
            for index in range(node.floats.start, node.floats.stop):
                owner = next((owner for owner, begin, end in ranges if begin <= index < end), None)
                equal = [
                    number
                    for number, (option, value) in enumerate(zip(self.options, self.had_numbers, strict=True))
                    if option.owner is owner and value == self.floats[index] and value
                ]
                if equal:
                    self.numbers[index] = frozenset(equal)


def view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape, strides and offset of a view."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


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


def _host_state(optimizer: Optimizer) -> str | None:
    """A description of state or options with which the optimizer computes on the host."""
    name = type(optimizer).__name__
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if type(value) in (int, float) or (isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE):
                return (
                    f"{name} keeps its {key!r} on the host; use the class of the same name in xla_amp.syncfree, or "
                    "capturable=True where the optimizer has it"
                )
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE:
                return f"{name} has a tensor on the host as {key!r}; move it to the device, or give a number"
    return None


def _same(one: jax.Array, other: jax.Array) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
