"""Observe the program that a recorded call of a step runs.

If two calls in a row ran exactly one program each, and the same one, then the program of a third call is known up to
its data: arguments, state, Python numbers and the random state.  `replay` classifies these and runs it.  Nothing here
depends on optimizers or modules.
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
from xla_amp.lazy.programs import causes, execute
from xla_amp.lazy.programs.compile import Program, steps
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.tensors import tensor_io, transfer
from xla_amp.lazy.torch_integration import generator

Reference = weakref.ref[Buffer]


class NotReplayableError(Exception):
    """A step cannot be replayed; the text is the reason for the user."""


@dataclasses.dataclass(kw_only=True)
class ObservedRun:
    """One program that ran during a recorded call."""

    program: Program
    code: tuple[int, ...]
    parameters: list[Reference]
    specs: list[Spec]
    targets: list[Reference]
    arrays: dict[int, jax.Array]
    """Arrays of parameters that no tensor held and the previous call did not produce: values from the host."""
    carried: dict[int, int]
    """Parameter -> target of the previous run, where they are the same buffer."""
    raw_floats: list[float]
    """The lifted floats as the operations received them."""
    floats: list[float]
    """The lifted floats as the program received them."""
    ints: list[int]
    streams: list[tuple[int, int]]
    generators: bool
    """Whether it drew from generators other than the device's own."""
    location: str
    """``file:line`` of the user's code that ended the step."""


class ProgramObserver:
    """Context manager that records the programs which run inside, on any thread, and the random state around them.

    Args:
        resolve: called with the lifted floats of each program before it runs; may change them in place.
        previous: the run of the call before.
    """

    def __init__(self, resolve: Callable[[list[float]], None], previous: ObservedRun | None) -> None:
        self._resolve = resolve
        self._previous = () if previous is None else previous.targets
        self._host_arrays: dict[int, jax.Array] = {}
        self.runs: list[ObservedRun] = []

    def __enter__(self) -> ProgramObserver:
        execute.flush()
        self.begin = generator.state()
        self._counts = metrics.host_syncs, generator.seedings
        self._outer, execute.observer = execute.observer, self
        return self

    def __exit__(self, *_: Any) -> None:
        execute.observer = self._outer
        self.end = generator.state()
        self.reads, self.seedings = metrics.host_syncs - self._counts[0], generator.seedings - self._counts[1]

    def before(self, parameters: list[Buffer], held: list[bool]) -> None:
        """Called before a program runs: keeps values from the host from being overwritten, to compare them later."""
        if self._outer is not None:
            self._outer.before(parameters, held)
        self._raw_floats = list(trace.floats)
        self._resolve(trace.floats)
        before = {id(buffer): index for index, ref in enumerate(self._previous) if (buffer := ref()) is not None}
        self._carried = {
            index: before[id(parameter)] for index, parameter in enumerate(parameters) if id(parameter) in before
        }
        self._host_arrays = {
            i: parameter.array for i, parameter in enumerate(parameters) if not held[i] and parameter.array is not None
        }
        for index in self._carried:
            self._host_arrays.pop(index, None)

    def after(self, program: Program, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """Called after `program` was dispatched."""
        self.runs.append(
            ObservedRun(
                program=program,
                code=code,
                parameters=[weakref.ref(parameter) for parameter in trace.parameters],
                specs=[parameter.spec for parameter in trace.parameters],
                targets=[weakref.ref(target) for target in targets],
                arrays=self._host_arrays,
                carried=self._carried,
                raw_floats=self._raw_floats,
                floats=list(trace.floats),
                ints=list(trace.ints),
                streams=list(trace.streams) or [generator.stream()],
                generators=bool(trace.generators),
                location=events.user_location(),
            )
        )

    def single_run(self) -> ObservedRun:
        """The one program that ran.

        Raises:
            NotReplayableError: there was none, or more than one, or Python read a value or seeded the generator.
        """
        if not self.runs:
            raise NotReplayableError("it records nothing on the lazy device")
        location = self.runs[0].location
        if self.reads:
            raise NotReplayableError(
                f"it reads a value on the host at {location} (item(), print, an `if` on a tensor, or a result whose "
                "size depends on data)"
            )
        if len(self.runs) > 1:
            raise NotReplayableError(f"it ends a step at {location}, so it is more than one program")
        if self.runs[0].generators:
            raise NotReplayableError("it draws from a torch.Generator; draw from the device's own (leave it out)")
        if self.seedings:
            raise NotReplayableError("it seeds the random generator; seed it outside")
        return self.runs[0]


def number_names(code: Sequence[int]) -> Iterator[str]:
    """For each lifted float of a trace, the operation that takes it."""
    for instruction, _, _ in steps(code):
        for _ in range(instruction.floats):
            yield instruction.name


def first_difference(one: Sequence[int], other: Sequence[int]) -> str:
    """A description of the first difference of two traces."""
    same = "the same operations keep other values alive from call to call (a list that grows? gradients not dropped?)"
    return causes.difference(one, other) or same


def argument_buffer(tensor: torch.Tensor) -> Buffer:
    """The buffer of a tensor argument, with nothing pending."""
    buffer = tensor_io.buffer_of(tensor)
    if buffer.number >= 0:
        execute.flush()
    return buffer


class Geometry(NamedTuple):
    """Shape, strides and offset of a tensor in its buffer, whose shape and dtype are `spec`."""

    spec: Spec
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    whole: bool
    """Whether the tensor is the whole buffer, contiguous."""

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of `tensor`."""
        spec, shape = tensor_io.buffer_of(tensor).spec, tuple(tensor.shape)
        whole = shape == spec.shape and tensor.is_contiguous()
        offset: Any = tensor.storage_offset()  # an int; torch's stubs also allow a SymInt
        return cls(spec, shape, tensor.stride(), offset, whole)

    def new_tensor(self, array: jax.Array) -> torch.Tensor:
        """A new tensor of this geometry over `array`."""
        tensor = transfer.wrap(array, self.spec)
        if self.whole:
            return tensor
        return tensor_io.set_geometry(tensor, tensor.untyped_storage(), self.offset, self.shape, self.strides)
