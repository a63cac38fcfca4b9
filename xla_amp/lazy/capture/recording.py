"""Record one call of a step: the program that it ran, and where its inputs came from and its results went.

An input is a tensor of the snapshot, known by its position; or a tensor that is the same one in each call; or a value
that the host brought, the same in each call.  A result goes to a position of the snapshot, or is returned.  If two
calls agree, the program of a third one is known up to its data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from xla_amp.common import events
from xla_amp.lazy.capture.state import Snapshot, State
from xla_amp.lazy.capture.values import NotReplayableError, difference, view
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Buffer, Spec, trace
from xla_amp.lazy.programs import execute, recompile_reasons
from xla_amp.lazy.programs.compile import XlaProgram
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.torch_integration import generator

Reference: TypeAlias = "weakref.ref[Buffer]"


class HostValue(NamedTuple):
    """A value that the host brings, the same in each call."""

    spec: Spec
    array: jax.Array


Source: TypeAlias = "int | Reference | HostValue | str"
"""An input: its position, a buffer that is the same in each call, a value from the host; or why a replay has none."""


class Target(NamedTuple):
    """A value that a call leaves in a buffer."""

    buffer: Reference
    spec: Spec
    number: int
    position: int | None
    """That had this buffer before the call, too."""
    is_new: bool
    """Whether the buffer had no value before."""


class Origin(NamedTuple):
    """Where a tensor that a call binds or returns comes from."""

    position: int | None
    """Before the call."""
    computed: int | None
    """Which of the values that it computes."""
    view: tuple[Any, ...]


class Recording:
    """One call.

    Args:
        state: of the step; learns which models and optimizers the call uses.
        before: its snapshot, which is released.
        previous: the last call of the same kind.
    """

    parameters: list[Reference]
    sources: list[Source]
    """Of each parameter."""
    held: list[bool]
    """Which parameters some tensor has at the end."""
    parameter_numbers: list[int]
    final_numbers: list[int]
    """Number of the value that each parameter has at the end."""
    overwritten: int
    """How many targets are parameters; they come first."""
    spent: tuple[int, ...]
    """Parameters whose arrays the program may take."""
    donated: tuple[int, ...]
    """Those whose memory it takes."""
    code: tuple[int, ...]
    count: int
    floats: list[float]
    ints: list[int]
    streams: list[tuple[int, int]]
    end: tuple[int, int]
    values: list[Any]
    """An entry for each Python value that the call returned."""

    def __init__(self, state: State, before: Snapshot, previous: Recording | None) -> None:
        self._state, self._previous, self._before = state, previous, before
        execute.flush()
        self.first_gradient = len(before.tensors)
        """Position; those of tensors come first."""
        self._had = [gradient is not None for gradient in before.gradients]
        self._places = [None if buffer is None else weakref.ref(buffer) for buffer in before.buffers]
        self._positions = {place: at for at, place in reversed([*enumerate(self._places)]) if place is not None}
        self.targets: list[Target] = []
        self.bindings: dict[int, Origin | None] = {}
        """Positions that have another tensor after the call than before; None if a gradient was dropped."""
        self.reads: dict[int, bool] = {}
        """Index of each gradient whose presence before the call matters -> whether there was one."""
        self.numbers: dict[int, frozenset[int]] = {}
        """Index of each lifted float that is an option of an optimizer -> the options with its value."""
        self._locations: list[str] = []
        """Where the user's code ended each program."""
        self._generators = False
        self._steps_of: list[tuple[Optimizer, int, int]] = []
        """Optimizers that stepped, and which lifted floats they recorded."""
        before.release()
        state.objects = None

    def call(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the step, whose operations become one program, and returns its result."""
        self.begin, reads, seedings = generator.state(), metrics.host_syncs, generator.seedings
        with (
            execute.flush_begins.subscribed(self._flushes),
            execute.flush_ends.subscribed(self._flushed),
            torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: self._state.saw(module)),
            register_optimizer_step_pre_hook(self._steps),
            register_optimizer_step_post_hook(self._stepped),
            step_marker.paused(),
        ):
            result = step(*args, **kwargs)
            execute.flush()
        self._previous, self.end = None, generator.state()
        self._counts = metrics.host_syncs - reads, generator.seedings - seedings
        return result

    # -- during the call -----------------------------------------------------------------------------------------

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        self._state.saw(optimizer)
        self._steps_of.append((optimizer, len(trace.floats), len(trace.floats)))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._steps_of and self._steps_of[-1][0] is optimizer:
            self._steps_of[-1] = optimizer, self._steps_of[-1][1], len(trace.floats)

    def _flushes(self, parameters: list[Buffer], held: list[bool]) -> None:
        """Before a program runs.  Arrays from the host are kept, so that no program takes their memory."""
        self._locations.append(events.user_location())
        self._generators = self._generators or bool(trace.generators)
        self.floats, self.held = list(trace.floats), list(held)
        self.sources = [self._source(slot, buffer, held[slot]) for slot, buffer in enumerate(parameters)]

    def _source(self, slot: int, buffer: Buffer, held: bool) -> Source:
        reference, earlier = weakref.ref(buffer), self._previous
        known = earlier is not None and slot < len(earlier.sources)
        if (position := self._positions.get(reference)) is not None:
            return position
        if held or not isinstance(buffer.array, jax.Array):
            if earlier is not None and known and earlier.parameters[slot] == reference:
                return reference
            return (
                f"it reads a tensor, {buffer.spec}, that is another one in each call, no argument and no state; "
                "pass it as an argument, or name the object that holds it: compile(step, state=[...])"
            )
        old = earlier.sources[slot] if earlier is not None and known else None
        if earlier is None or (isinstance(old, HostValue) and _bytes(old.array) == _bytes(buffer.array)):
            return HostValue(buffer.spec, buffer.array)
        return (
            f"it brings a value from the host, {buffer.spec}, that is another in each call; make it a tensor on the "
            "device outside and pass it as an argument"
        )

    def _flushed(self, program: XlaProgram, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """After `program` was dispatched."""
        self.spent, self.donated = program.key.spent, program.donated
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
        self._computed = {target.buffer: at for at, target in enumerate(self.targets[self.overwritten :])}

    # -- after it ------------------------------------------------------------------------------------------------

    def resolve(self, after: Snapshot) -> None:
        """Finds where results went, which gradients matter, and which numbers are options of optimizers.

        Args:
            after: the snapshot after the call.

        Raises:
            NotReplayableError: there was no program, or more than one, or Python read or changed a value, or the call
                binds what a replay cannot.
        """
        obstacle = self._obstacle(after)
        if obstacle is not None:
            raise NotReplayableError(obstacle)
        written, read = {each.buffer for each in self.targets}, {each for each in self.sources if isinstance(each, int)}
        for at, (before, buffer) in enumerate(zip(self._places, after.buffers, strict=True)):
            tensor, now = after.tensor(at), None if buffer is None else weakref.ref(buffer)
            if now != before or (tensor is not None and now is None):
                self._bind(at, after)
            if at >= self.first_gradient:
                had = self._had[at - self.first_gradient]
                touched = before in written if now == before else not had
                if at in read or touched or not (had or tensor is not None):
                    self.reads[at - self.first_gradient] = had
        self._match_numbers(after)

    def _obstacle(self, after: Snapshot) -> str | None:
        """What Python did in the call that a replay cannot repeat."""
        if not self._locations:
            return "it records nothing on the lazy device"
        location, (reads, seedings) = self._locations[0], self._counts
        if reads:
            what = "item(), print, an `if` on a tensor, or a result whose size depends on data"
            return f"it reads a value on the host at {location} ({what})"
        if len(self._locations) > 1:
            return f"it ends a step at {location}, so it is more than one program"
        if self._generators:
            return "it draws from a torch.Generator; draw from the device's own (leave it out)"
        if seedings or self.begin[0] != self.end[0]:
            return "it seeds the random generator; seed it outside"
        before = self._before
        changed = difference(before.unchanged(), after.unchanged())
        return changed and "it changes {}{}, which a replay would not; do that outside".format(*changed)

    def _bind(self, at: int, after: Snapshot) -> None:
        """Notes what is at a position now."""
        tensor, label = after.tensor(at), after.label(at)
        if tensor is None:
            self.bindings[at] = None
            return
        if tensor.is_sparse:
            raise NotReplayableError(f"it leaves a sparse tensor as {label}; drop it inside (zero_grad())")
        if tensor.requires_grad:
            raise NotReplayableError(f"it binds {label} to a tensor that requires grad; bind tensor.detach()")
        self.bindings[at] = origin = self.origin(tensor)
        if origin is None or after.place(at)[0] is None:
            raise NotReplayableError(f"it binds {label} to a tensor that it neither computes nor finds in its state")

    def origin(self, tensor: torch.Tensor) -> Origin | None:
        """Where a tensor comes from; None if the call has neither found it in the state nor computed it."""
        reference = weakref.ref(tensor_io.buffer_of(tensor))
        position = self._positions.get(reference)
        computed = None if position is not None else self._computed.get(reference)
        return None if position is None and computed is None else Origin(position, computed, view(tensor))

    def _match_numbers(self, after: Snapshot) -> None:
        """Finds the lifted floats that the kernels of sync-free optimizers take, by their values."""
        for node in nodes(self.code) if after.options else ():
            if not node.instruction.name.startswith("_fused_"):
                continue
            for index in range(node.floats.start, node.floats.stop):
                owner = next((owner for owner, begin, end in self._steps_of if begin <= index < end), None)
                value = self.floats[index]
                pairs = enumerate(zip(after.options, self._before.numbers, strict=True))
                equal = [at for at, (option, number) in pairs if option.owner is owner and number == value != 0]
                if equal:
                    self.numbers[index] = frozenset(equal)

    def difference(self, other: Recording) -> str | None:
        """Why another call of this kind does not do the same, None if it does; options of optimizers may differ."""
        if self.code != other.code:
            return f"its calls differ: {recompile_reasons.difference(self.code, other.code) or 'another operation'}"
        if self.ints != other.ints:
            change = next(f"{a} in one, {b} in the next" for a, b in zip(self.ints, other.ints, strict=True) if a != b)
            return f"its calls differ: whole numbers in it change from call to call: {change}"
        if [target.number for target in self.targets] != [target.number for target in other.targets]:
            return "its calls keep other values alive (a list that grows? gradients not dropped?)"
        for old, new in zip(self.sources, other.sources, strict=True):
            if isinstance(new, str):
                return new
            if isinstance(new, int) and old != new:
                return "its calls read different tensors of its state in the same operations"
        if self.bound() != other.bound():
            return "its calls bind different tensors of its state"
        if self.values != other.values:
            kinds = ", ".join(dict.fromkeys(kind.__name__ for kind, *_ in (*self.values, *other.values)))
            return (
                f"it returns a Python value that is another one in each call (among {kinds}); return tensors and "
                "constants, in tuples, lists and dictionaries"
            )
        names = [node.instruction.name for node in nodes(other.code) for _ in range(node.instruction.floats)]
        for index, (one, two) in enumerate(zip(self.floats, other.floats, strict=True)):
            if one != two and not self.options(other).get(index):
                return (
                    f"Python computes {two!r} for {names[index]}, a number that changes from call to call ({one!r} "
                    "before); keep it in a tensor on the device, or pass it as one"
                )
        return None

    def has_stepped(self) -> bool:
        """Whether an optimizer stepped, or a gradient was written: the backward pass is inside."""
        written = [*(target.position for target in self.targets), *self.bindings]
        return bool(self._steps_of) or any(at is not None and at >= self.first_gradient for at in written)

    def bound(self) -> dict[int, Origin]:
        """The bindings to a tensor; that a gradient was dropped depends on whether there was one."""
        return {at: origin for at, origin in self.bindings.items() if origin is not None}

    def options(self, other: Recording) -> dict[int, frozenset[int]]:
        """Which lifted floats are options of optimizers in both calls, as far as the two can tell."""
        return {at: both for at, one in self.numbers.items() if (both := one & other.numbers.get(at, frozenset()))}


def _bytes(array: jax.Array) -> bytes:
    return np.asarray(array).tobytes()
