"""Watching what a call of a step runs.

Two calls are watched.  When both ran exactly one program, and the same one, then what a third call would run is known
up to its data: arguments, values that live on between the calls, Python numbers, the random state; `replay` tells them
apart and runs it.  Nothing here knows what an optimizer or a module is.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import torch

from xla_amp import events
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.graph.trace import Spec, trace
from xla_amp.lazy.runtime import execute, generator
from xla_amp.lazy.runtime.compile import Program, steps
from xla_amp.lazy.runtime.metrics import metrics
from xla_amp.lazy.tensors import tensor_io, transfer

Reference = weakref.ref[Buffer]


class NotReplayable(Exception):
    """Why a step cannot be run without recording it, in words for the user."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """One program that ran while somebody watched."""

    program: Program
    code: tuple[int, ...]
    parameters: list[Reference]
    specs: list[Spec]
    targets: list[Reference]
    arrays: dict[int, jax.Array]
    """Arrays of the parameters that no tensor held and the call before did not leave: values that the host brought."""
    carried: dict[int, int]
    """Parameters that are targets of the run before: parameter -> target."""
    seen: list[float]
    """The lifted numbers as the operations were given them."""
    floats: list[float]
    """The same as the program was given them."""
    ints: list[int]
    streams: list[tuple[int, int]]
    where: str
    """The user's line that ended the step."""


class Watch:
    """Context manager that notes the programs which run inside, on whatever thread, and the random state around them.

    Args:
        resolve: called with the lifted numbers of each program before it runs; may change them in place.
        previous: the run of the call before.
    """

    def __init__(self, resolve: Callable[[list[float]], None], previous: Run | None) -> None:
        self._resolve = resolve
        self._previous = () if previous is None else previous.targets
        self._fresh: dict[int, jax.Array] = {}
        self.runs: list[Run] = []

    def __enter__(self) -> Watch:
        execute.cut()
        self.begin = generator.state()
        self._counts = metrics.host_syncs, generator.seedings
        self._outer, execute.observer = execute.observer, self
        return self

    def __exit__(self, *_: Any) -> None:
        execute.observer = self._outer
        self.end = generator.state()
        self.reads, self.seedings = metrics.host_syncs - self._counts[0], generator.seedings - self._counts[1]

    def before(self, parameters: list[Buffer], held: list[bool]) -> None:
        """Called by the cut: keeps values that the host brought from being overwritten, for comparing them."""
        if self._outer is not None:
            self._outer.before(parameters, held)
        self._seen = list(trace.floats)
        self._resolve(trace.floats)
        before = {id(buffer): index for index, ref in enumerate(self._previous) if (buffer := ref()) is not None}
        self._carried = {
            index: before[id(parameter)] for index, parameter in enumerate(parameters) if id(parameter) in before
        }
        self._fresh = {
            i: parameter.array for i, parameter in enumerate(parameters) if not held[i] and parameter.array is not None
        }
        for index in self._carried:
            self._fresh.pop(index, None)

    def after(self, program: Program, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """Called by the cut once `program` was dispatched."""
        self.runs.append(
            Run(
                program=program,
                code=code,
                parameters=[weakref.ref(parameter) for parameter in trace.parameters],
                specs=[parameter.spec for parameter in trace.parameters],
                targets=[weakref.ref(target) for target in targets],
                arrays=self._fresh,
                carried=self._carried,
                seen=self._seen,
                floats=list(trace.floats),
                ints=list(trace.ints),
                streams=list(trace.streams) or [generator.stream()],
                where=events.user_location(),
            )
        )


def number_names(code: Sequence[int]) -> Iterator[str]:
    """The operation that each lifted float of a trace belongs to, in their order."""
    for instruction, _, _ in steps(code):
        for _ in range(instruction.floats):
            yield instruction.name


def only_run(watch: Watch) -> Run:
    """The one program that ran.

    Raises:
        NotReplayable: there was none, or more than one, or Python read a value or seeded the generator.
    """
    if not watch.runs:
        raise NotReplayable("it records nothing on the lazy device")
    if watch.reads:
        raise NotReplayable(
            f"it reads a value on the host at {watch.runs[0].where} (item(), print, an `if` on a tensor, or a result "
            "whose size depends on data)"
        )
    if len(watch.runs) > 1:
        raise NotReplayable(f"it ends a step at {watch.runs[0].where}, so it is more than one program")
    if watch.seedings:
        raise NotReplayable("it seeds the random generator; seed it outside")
    return watch.runs[0]


def first_difference(one: Sequence[int], other: Sequence[int]) -> str:
    """Where two traces part, in words."""
    mine, others = list(steps(one)), list(steps(other))
    for number, (a, b) in enumerate(zip(mine, others, strict=False)):
        if a[0] is not b[0]:
            return f"operation {number} is {_show(a[0])} in one call and {_show(b[0])} in the next"
    if len(mine) != len(others):
        return f"one call records {len(mine)} operations, the next {len(others)}"
    return "the same operations keep other values alive from call to call (a list that grows? gradients not dropped?)"


def _show(instruction: Any) -> str:
    outs = ", ".join(map(repr, instruction.outs))
    return f"{instruction.name} -> {outs}"


def argument_buffer(tensor: torch.Tensor) -> Buffer:
    """The buffer of a tensor argument, with nothing pending."""
    buffer = tensor_io.buffer_of(tensor)
    if buffer.number >= 0:
        execute.cut()
    return buffer


class Geometry(NamedTuple):
    """How a tensor lies in its buffer, of shape and dtype `spec`."""

    spec: Spec
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    whole: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of `tensor`."""
        spec, shape = tensor_io.buffer_of(tensor).spec, tuple(tensor.shape)
        whole = shape == spec.shape and tensor.is_contiguous()
        return cls(spec, shape, tensor.stride(), tensor.storage_offset(), whole)


def result(array: jax.Array, geometry: Geometry) -> torch.Tensor:
    """A fresh tensor over `array`."""
    tensor = transfer.wrap(array, geometry.spec)
    if geometry.whole:
        return tensor
    store = tensor.untyped_storage()
    return tensor_io.set_geometry(tensor, store, geometry.offset, geometry.shape, geometry.strides)
