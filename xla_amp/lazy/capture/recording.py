"""Record one call of a step: the program that it ran, and where its inputs came from and its results went.

An input is a tensor of the snapshot, known by its position, or a constant.  A result goes to a position, or is
returned.  If two calls agree, the program of a third one is known up to its data.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import jax
import numpy as np
import torch
from torch.nn.modules import module

from xla_amp.lazy.capture.counters import Count
from xla_amp.lazy.capture.state import Snapshot, State
from xla_amp.lazy.capture.values import PLAIN, NotReplayableError, differences, is_dense, plain, view
from xla_amp.lazy.graph import generator
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import Buffer, Spec, this_thread, trace
from xla_amp.lazy.programs import execute, recompile_reasons
from xla_amp.lazy.programs.observed import observed
from xla_amp.lazy.steps import optimizer_step, step_marker
from xla_amp.lazy.tensors import tensor_io
from xla_amp.torch_common import dynamo
from xla_amp.torch_common.trees import tree_leaves
from xla_amp.training.reader import NOWHERE, functions

Reference: TypeAlias = "ref[Buffer]"
Source: TypeAlias = "int | Reference | Buffer"
"""An input: its position, a buffer that is the same in each call, or one with a value that the host brought."""

_OF_OPTIMIZERS = "_fused_", optimizer_step.OPTIONS
"""Names of the instructions, or how they begin, whose floats are options of optimizers as they are."""


class Target(NamedTuple):
    """A value that a call computes and leaves in a buffer that is no input."""

    buffer: Reference
    spec: Spec
    position: int | None
    """That had this buffer before the call, too."""
    is_new: bool
    """Whether the buffer had no value before."""


class Origin(NamedTuple):
    """Where a tensor that a call binds or returns comes from."""

    at: int
    """Its position before the call; ``~n`` for the n-th of the values that the call computes."""
    view: tuple[Any, ...]


class Recording:
    """One call; `state` learns which models and optimizers it uses, and `before`, its snapshot, is released."""

    def __init__(self, state: State, before: Snapshot) -> None:
        self._state, self._before = state, before
        execute.flush()
        self.first_gradient = len(before.tensors)
        """Position; those of tensors come first."""
        self._places = [None if buffer is None else ref(buffer) for buffer in before.buffers]
        self._origins = {place: at for at, place in reversed([*enumerate(self._places)]) if place is not None}
        self._tensors = [ref(each.value) for each in before.tensors]
        self.data: set[int] = set()
        """Positions where the call gives the tensor that is there other data (``.data =``)."""
        self.bindings: dict[int, Origin | None] = {}
        """Positions that have another tensor after the call than before; None if a gradient was dropped."""
        self.reads: set[int] = set()
        """The parameters where it matters whether they have a gradient before the call."""
        self.options: dict[int, int] = {}
        """Index of each lifted float of an optimizer -> the first number of an optimizer that equals it."""
        self.stepped = False
        pairs = zip(before.options, before.numbers, strict=True)
        self.numbers = [number if option.is_input else None for option, number in pairs]
        """Those of optimizers before the call that may be inputs."""
        self._steered = before.steered()
        """As they are now, as far as calls that a replay repeats have changed them."""
        self.repeated: list[str] = []
        """The objects of which the call has called the method that a replay calls, in this order."""
        self._inside = False
        self.counts: dict[str, Count] = {}
        """Integers on the host that the call changes, each by a number."""
        self._misstep: str | None = None
        """Why a replay cannot step a schedule as the call did."""
        before.release()
        state.forget()

    def call(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the step, whose operations become one program, and returns its result."""
        owner = this_thread()

        @dynamo.graph_break
        def saw(called: torch.nn.Module, _: Any) -> None:
            if this_thread() is owner:
                self._state.saw(called)

        chance = _chance()
        with trace.lock:
            self.begin, reads, seedings = generator.state(), trace.reads, trace.seedings
            hook = module.register_module_forward_pre_hook(saw)  # torch numbers its hooks without a lock
        with (
            hook,
            observed(self._source) as runs,
            step_marker.optimizer_steps.subscribed(self._steps),
            step_marker.paused(),
            self._watched(),
        ):
            with _freed_cycles():
                result = step(*args, **kwargs)
            execute.flush()
        with trace.lock:
            self.end = generator.state()
            self._reads, self._seedings = trace.reads - reads, trace.seedings - seedings
        self._drew = [name for name, state in _chance().items() if state != chance[name]]
        self._runs = runs
        for run in runs[:1]:
            self._read(run)
        for run in runs:
            run.parameters, run.targets = [], []
        return result

    def _steps(self, optimizer: torch.optim.Optimizer) -> None:
        self._state.saw(optimizer)
        self.stepped = True
        for label in self.repeated:
            schedule, name = self._before.repeated[label]
            owners = getattr(schedule, "optimizers", [getattr(schedule, "optimizer", optimizer)])
            if name == "step" and any(each.param_groups is optimizer.param_groups for each in owners):
                self._misstep = f"it steps {label} before its optimizer, and a replay does so last; step it afterwards"

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Context manager: calls of the methods that a replay calls are counted."""
        spaces = [(vars(owner), name, vars(owner).get(name)) for owner, name in self._before.repeated.values()]
        for label, (owner, name) in self._before.repeated.items():
            vars(owner)[name] = functools.partial(self._repeat, label, getattr(owner, name))
        try:
            yield
        finally:
            for space, name, before in reversed(spaces):
                space.pop(name) if before is None else space.update({name: before})

    def _repeat(self, label: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # a schedule of a schedule
            return method(*args, **kwargs)
        self.repeated.append(label)
        owner, name = self._before.repeated[label]
        if name == "step" and (args or kwargs):
            what = f"{label} (a {type(owner).__name__}) with a metric or an epoch"
            self._misstep = f"it steps {what}, which a replay does not have; step it outside"
        known = self._before.steered() == self._steered
        self._inside = True
        try:
            return method(*args, **kwargs)
        finally:
            self._inside = False
            if known:
                self._steered = self._before.steered()

    def _source(self, buffer: Buffer, held: bool) -> Source:
        """Where an input comes from.  Arrays from the host are kept, so that no program takes their memory."""
        reference = ref(buffer)
        from_host = not held and isinstance(buffer.array, jax.Array)
        return self._origins.get(reference, Buffer(buffer.spec, array=buffer.array) if from_host else reference)

    def _read(self, run: execute.Run) -> None:
        self.run = run
        self._written = set(map(ref, run.targets))
        inputs = set(map(id, run.parameters))
        self.computed = [
            Target(ref(each), each.spec, self._origins.get(ref(each)), is_new)
            for each, is_new in zip(run.targets, run.made, strict=True)
            if id(each) not in inputs
        ]
        new = {target.buffer: ~at for at, target in enumerate(self.computed) if target.is_new}
        self._origins = {**new, **self._origins}

    def resolve(self, after: Snapshot, result: Any) -> None:
        """Finds where results went, which gradients matter, and which numbers are options of optimizers.

        Raises:
            NotReplayableError: there was no program, or more than one, or Python read or changed a value, or the call
                binds or returns what a replay cannot.
        """
        if (obstacle := self._obstacle(after)) is not None:
            raise NotReplayableError(obstacle)
        read = {each for each in self.run.inputs if isinstance(each, int)}
        for at, (before, buffer) in enumerate(zip(self._places, after.buffers, strict=True)):
            tensor, label, slot = after.at(at)
            now = None if buffer is None else ref(buffer)
            if now != before or (tensor is not None and now is None):
                self.bindings[at] = origin = None if tensor is None else self._origin(tensor)
                is_state = at < self.first_gradient
                if is_state and self._tensors[at]() is tensor:
                    self.data.add(at)
                # A graph that the step has used is left out, as that of a result.
                graph = (
                    tensor is not None and tensor.requires_grad and (tensor.is_leaf or not (is_state and self.stepped))
                )
                if tensor is not None and (origin is None or (at not in self.data and (graph or slot is NOWHERE))):
                    raise NotReplayableError(
                        f"it leaves as {label} a tensor that is sparse, requires grad, or is neither computed nor "
                        "state; bind tensor.detach(), or drop it inside (zero_grad())"
                    )
            if at >= self.first_gradient:
                had = self._before.had_gradient[at - self.first_gradient]
                touched = before in self._written if now == before else not had
                if at in read or touched or not (had or tensor is not None):
                    self.reads.add(at - self.first_gradient)
        self.returned = [self._returned(each) for each in tree_leaves(result)]
        """An origin, or what a value is compared by, which is the same in each call."""
        run = self.run
        for node in (node for node in nodes(run.key.code) if node.instruction.name.startswith(_OF_OPTIMIZERS)):
            for at in range(node.floats.start, node.floats.stop):
                if run.floats[at] and run.floats[at] in self.numbers:
                    self.options[at] = self.numbers.index(run.floats[at])

    def _obstacle(self, after: Snapshot) -> str | None:
        """What Python did in the call that a replay cannot repeat."""
        if not self._runs or not self.run.key.code:
            return "it records nothing on the lazy device"
        if self._misstep:
            return self._misstep
        if self._reads:
            what = "item(), print, an `if` on a tensor, or a result whose size depends on data"
            return f"it reads a value on the host at {self.run.where} ({what})"
        if len(self._runs) > 1:
            return f"it ends a step at {self.run.where}, so it is more than one program"
        if self.run.generators:
            return "it draws from a torch.Generator; draw from the device's own (leave it out)"
        if self._seedings or self.begin[0] != self.end[0]:
            return "it seeds the random generator; seed it outside"
        if self._drew:
            what = "draw on the device, or outside, and pass the result as a tensor or a number"
            others = " (or another thread did meanwhile)" if threading.active_count() > 1 else ""
            return f"it draws from {self._drew[0]} on the host{others}, where a replay would not ({what})"
        old, new = self._before.unchanged(self._steered), after.unchanged(after.steered())
        changes = {label: each for label, *each in differences(old, new)}
        same = {label: ["", by, by] for label, by in itertools.chain(*new) if label in self._state.counters}
        counts, owners = after.by_label("counts"), after.by_label("owners")
        names = {label: label.rpartition(".")[::2] for label in {**changes, **same}}
        for label, (how, one, other) in {**same, **changes}.items():
            (owner, name), read = names[label], ""
            holder = owners.get(owner)
            try:
                if label in counts and one is not None and one[:-1] == other[:-1]:
                    code = functions(self._state.functions, holder)
                    self.counts[label] = Count(one, other, code, holder, name, {each for _, each in names.values()})
                    self._state.counters.add(label)
                    continue
            except NotReplayableError as reason:
                read = str(reason)
            is_own = isinstance(holder, torch.optim.Optimizer) and not name.startswith("param_groups")
            remedy = "keep it in a tensor on the device" if is_own or label[-1] == ")" else "do that outside"
            return f"it changes {label}{how}{read}, which a replay would not; {remedy}"
        return None

    def _origin(self, tensor: torch.Tensor) -> Origin | None:
        """Where a tensor comes from; None if a replay cannot make it."""
        if not is_dense(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        at = self._origins.get(ref(tensor_io.buffer_of(tensor)))
        return None if at is None else Origin(at, view(tensor))

    def _returned(self, value: Any) -> Origin | tuple[Any, ...]:
        if not isinstance(value, torch.Tensor):
            # An object that is no plain value may hold tensors, so it is equal to itself only.
            return plain(value) if type(value) in PLAIN else (type(value), id(value), value)
        written = {self._origins.get(each, -1) for each in self._written}.union(self.bindings)
        if value.requires_grad and not self.stepped and max(written, default=-1) < self.first_gradient:
            raise NotReplayableError(
                "it returns a tensor that requires grad, and gradients do not reach into a replay; call backward() "
                "inside, or run it under torch.no_grad()"
            )
        origin = self._origin(value)
        if origin is None:
            raise NotReplayableError(
                f"it returns a tensor on {value.device} ({value.layout}) that a replay would not compute; return a "
                f"dense one that it computes on {tensor_io.DEVICE_TYPE!r}, after resolve_conj()"
            )
        return origin

    def difference(self, other: Recording) -> str | None:
        """Why another call of this kind does not do the same, None if it does; options of optimizers may differ."""
        run, again = self.run, other.run
        if run.key.code != again.key.code:
            how = recompile_reasons.difference(run.key.code, again.key.code)
            return f"its calls differ: {how or 'another operation'}"
        if self.repeated != other.repeated:
            return f"its calls differ: they step {self.repeated or 'no schedule'} and {other.repeated or 'none'}"
        amounts = [{label: each.amount for label, each in call.counts.items()} for call in (self, other)]
        if amounts[0] != amounts[1]:
            return f"its calls differ: they add {amounts[0]} and {amounts[1]} on the host"
        if run.ints != again.ints:
            return "its calls differ: whole numbers in it change from call to call"
        if run.key.wanted != again.key.wanted:
            return "its calls keep other values alive (a list that grows? gradients not dropped?)"
        for old, new in zip(run.inputs, again.inputs, strict=True):
            if not _same(old, new):
                return (
                    "it reads a tensor that is another one in each call; pass it as an argument, or name the object "
                    "that holds it: compile(step, state=[...])"
                )
        bound = [{at: origin for at, origin in each.bindings.items() if origin is not None} for each in (self, other)]
        # A gradient that was there may be dropped.
        if self.returned != other.returned or self.data != other.data or bound[0] != bound[1]:
            return (
                "it returns or binds a Python value or tensor that is another one in each call; return tensors and "
                "constants, in tuples, lists and dictionaries"
            )
        names = [node.instruction.name for node in nodes(again.key.code) for _ in range(node.instruction.floats)]
        for at, (one, two) in enumerate(zip(run.floats, again.floats, strict=True)):
            if repr(one) != repr(two) and not (at in self.options and self.options[at] == other.options.get(at)):
                return (
                    f"Python computes {two!r} for {names[at]}, a number that changes from call to call ({one!r} "
                    "before); keep it in a tensor on the device, or pass it as one"
                )
        return None


def _chance() -> dict[str, bytes]:
    """The states of the random generators on the host that all code shares."""
    numpy = pickle.dumps(np.random.get_state(legacy=False))
    of_torch = torch.get_rng_state().numpy().tobytes()
    return {"torch's CPU generator": of_torch, "`random`": pickle.dumps(random.getstate()), "NumPy's generator": numpy}


@contextlib.contextmanager
def _freed_cycles() -> Iterator[None]:
    """Context manager: at its end values that only cycles hold are freed; when Python does so differs between calls.

    Objects that are made inside stay in the generation of the garbage collector that is cheap, unless the step, or
    another thread, collects meanwhile.
    """
    enabled, before = gc.isenabled(), gc.get_stats()
    gc.disable()
    try:
        yield
        with trace.lock:  # one thread at a time
            gc.collect(0 if gc.get_stats() == before else 2)
    finally:
        if enabled:
            gc.enable()


def _same(old: Source, new: Source) -> bool:
    if isinstance(old, Buffer) and isinstance(new, Buffer):
        return np.asarray(old.array).tobytes() == np.asarray(new.array).tobytes()
    return old == new
