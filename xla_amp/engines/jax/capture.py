"""Recording a step once and running its program again without recording it.

Two calls of a step are watched.  When both ran exactly one program, and the same one, then what a third call would run
is known up to its data: arguments, values that live on between the calls, Python numbers, the random state.  Of each
input of the program this file says which of these it is, from what the two calls had in common; an input that is none
of them is a reason not to replay.  Nothing here knows what an optimizer or a module is.
"""

from __future__ import annotations

import dataclasses
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, call, itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from xla_amp.engines.jax import compat, cut, mesh, random, runtime, storage, transfer
from xla_amp.engines.jax.metrics import metrics
from xla_amp.engines.jax.program import Program, steps
from xla_amp.engines.jax.tape import Buffer, Lost, Spec, new_weakref, tape
from xla_amp.errors import StepFailedError

Reference = weakref.ref[Buffer]


class NotReplayable(Exception):
    """Why a step cannot be run without recording it, in words for the user."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """One program that ran while somebody watched."""

    program: Program
    code: tuple[int, ...]
    leaves: list[Reference]
    specs: list[Spec]
    targets: list[Reference]
    arrays: dict[int, jax.Array]
    """Arrays of the leaves that no tensor held and the call before did not leave: values that the host brought."""
    carried: dict[int, int]
    """Leaves that are targets of the run before: leaf -> target."""
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
        cut.cut()
        self.begin = random.state()
        self._counts = metrics.host_syncs, random.seedings
        self._outer, cut.observer = cut.observer, self
        return self

    def __exit__(self, *_: Any) -> None:
        cut.observer = self._outer
        self.end = random.state()
        self.reads, self.seedings = metrics.host_syncs - self._counts[0], random.seedings - self._counts[1]

    def before(self, leaves: list[Buffer], held: list[bool]) -> None:
        """Called by the cut: keeps values that the host brought from being overwritten, for comparing them."""
        if self._outer is not None:
            self._outer.before(leaves, held)
        self._seen = list(tape.floats)
        self._resolve(tape.floats)
        before = {id(buffer): index for index, ref in enumerate(self._previous) if (buffer := ref()) is not None}
        self._carried = {index: before[id(leaf)] for index, leaf in enumerate(leaves) if id(leaf) in before}
        self._fresh = {i: leaf.array for i, leaf in enumerate(leaves) if not held[i] and leaf.array is not None}
        for index in self._carried:
            self._fresh.pop(index, None)

    def after(self, program: Program, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """Called by the cut once `program` was dispatched."""
        self.runs.append(
            Run(
                program=program,
                code=code,
                leaves=[new_weakref(leaf) for leaf in tape.leaves],
                specs=[leaf.spec for leaf in tape.leaves],
                targets=[new_weakref(target) for target in targets],
                arrays=self._fresh,
                carried=self._carried,
                seen=self._seen,
                floats=list(tape.floats),
                ints=list(tape.ints),
                streams=list(tape.streams) or [random.stream()],
                where=_users_line(),
            )
        )


def _users_line() -> str:
    """The newest line of the stack that is neither torch's nor ours."""
    ours = __name__.partition(".")[0]
    for frame in reversed(traceback.extract_stack()):
        parts = frame.filename.replace("\\", "/").split("/")
        if "torch" not in parts and ours not in parts and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def number_names(code: Sequence[int]) -> Iterator[str]:
    """The operation that each lifted float of a tape belongs to, in their order."""
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
    """Where two tapes part, in words."""
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


class Replay:
    """A program with what to feed it and where its outputs go.

    Args:
        earlier: the run of one call.
        later: the run of the next call.
        begin, end: random state around the later call.
        arguments: buffers of the later call's tensor arguments.

    Raises:
        NotReplayable: an input is neither an argument, nor a value that lives on, nor the same in both calls.
    """

    def __init__(
        self,
        earlier: Run,
        later: Run,
        begin: tuple[int, int],
        end: tuple[int, int],
        arguments: Sequence[Buffer],
    ) -> None:
        if earlier.program is not later.program:
            raise NotReplayable(f"its calls differ: {first_difference(earlier.code, later.code)}")
        if earlier.ints != later.ints:
            raise NotReplayable(f"whole numbers in it change from call to call: {_changed(earlier.ints, later.ints)}")
        self.program = later.program
        self.ints = later.ints
        self._constants: list[Buffer] = []
        self._arguments: list[tuple[int, int]] = []
        self._sources = self._classify(earlier, later, arguments)
        self._targets = list(later.targets)
        # A replay touches every array, so what it does for each of them is one C call over all: these say which.
        self._kept, self._donated = _picker(later.program.kept), _picker(later.program.donated)
        place_in_kept = {leaf: place for place, leaf in enumerate(later.program.kept)}
        computed = len({place for place in later.program.outputs if place >= 0})
        self._results = _picker([at if at >= 0 else computed + place_in_kept[~at] for at in later.program.outputs])
        self._layouts = [struct.sharding for part in later.program.abstract[:2] for struct in part]
        self._words: tuple[int, ...] | None = None
        seed, offset = begin
        self._streams = [(None if s == seed else s, at - offset if s == seed else at) for s, at in later.streams]
        if end[0] != seed:
            raise NotReplayable("it seeds the random generator; seed it outside")
        self._advance = end[1] - offset

    def _classify(self, earlier: Run, later: Run, arguments: Sequence[Buffer]) -> list[Reference]:
        position = {id(buffer): index for index, buffer in enumerate(arguments)}
        sources: list[Reference] = []
        for index, (old, new) in enumerate(zip(earlier.leaves, later.leaves, strict=True)):
            buffer, spec = new(), later.specs[index]
            if buffer is not None and id(buffer) in position:
                self._arguments.append((index, position[id(buffer)]))
                sources.append(new_weakref(_nobody))
            elif buffer is not None and old() is buffer:
                sources.append(new)
            elif index in later.carried:  # the last call left it: this one's counterpart is what the next call reads
                sources.append(later.targets[later.carried[index]])
            elif index not in later.arrays:
                raise NotReplayable(
                    f"it reads a tensor, {spec}, that is another one in each call and no argument; pass it as an "
                    "argument"
                )
            elif index not in earlier.arrays or not _same(earlier.arrays[index], later.arrays[index]):
                raise NotReplayable(
                    f"it brings a value from the host, {spec}, that is another in each call; make it a tensor on the "
                    "device outside and pass it as an argument"
                )
            else:
                self._constants.append(Buffer(spec, array=later.arrays[index]))
                sources.append(new_weakref(self._constants[-1]))
        return sources

    def place_of(self, buffer: Buffer) -> int | None:
        """Where among the program's targets `buffer` is, or None."""
        return next((place for place, ref in enumerate(self._targets) if ref() is buffer), None)

    def values(self) -> list[Any]:
        """What the targets hold now (None for one that nobody holds any more)."""
        return [None if (buffer := ref()) is None else buffer.array for ref in self._targets]

    def keeps(self, buffer: Buffer) -> bool:
        """Whether `buffer` is an input that lives on from call to call."""
        return any(ref() is buffer for ref in self._sources)

    def run(self, arguments: Sequence[Buffer], floats: Any) -> list[jax.Array] | None:
        """Runs the program; returns the arrays of all its targets, or None when a value it needs is no longer there.

        Args:
            arguments: buffers of the tensor arguments.
            floats: the lifted numbers, float64, of NumPy or `uploaded`.

        Raises:
            StepFailedError: a value that it needs was lost in a failed step.
        """
        buffers = list(map(call, self._sources))
        for leaf, index in self._arguments:
            buffers[leaf] = arguments[index]
        if None in buffers:
            return None
        if mesh.active is not None:
            mesh.bring_home(buffers)
        arrays = list(map(_array, buffers))
        program = self.program
        kinds = set(map(type, arrays))
        if Lost in kinds:
            raise StepFailedError(next(array.reason for array in arrays if type(array) is Lost))
        if type(None) in kinds:
            return None
        kept, donated = self._kept(arrays), self._donated(arrays)
        del arrays
        if mesh.active is not None and not mesh.replicas and not all(map(_lies, [*donated, *kept], self._layouts)):
            return None
        counts = cut.reference_counts(donated)
        if max(counts, default=0) > cut.ALONE + 1:
            for place, count in enumerate(counts):
                if count > cut.ALONE + 1:  # somebody beside its buffer holds it: a copy of the tensor, a read under way
                    donated[place] = donated[place].copy()
        seed, offset = random.state()
        try:
            with compat.x64():
                outputs = cut.dispatch(program, donated, kept, floats, self._whole_numbers(seed, offset))
        except Exception as error:
            raise self._failed(buffers, error) from error
        metrics.executions += 1
        metrics.operations += program.operations
        if self._advance:
            random.set_state(seed, offset + self._advance)
        cut.note(self._targets)
        values = self._results([*outputs, *kept])
        for buffer, value in zip(map(call, self._targets), values, strict=True):
            if buffer is not None:
                buffer.array = value
        return values

    def _whole_numbers(self, seed: int, offset: int) -> Any:
        """The random streams and the lifted whole numbers; those of the last call where they are the same."""
        words = tuple(word for s, at in self._streams for word in ((seed, offset + at) if s is None else (s, at)))
        if words != self._words:
            self._words, self._ints = words, np.array([*words, *self.ints], np.int64)
            self._uploaded = None
        elif self._uploaded is None:
            self._uploaded = uploaded(self._ints)
        return self._ints if self._uploaded is None else self._uploaded

    @staticmethod
    def _failed(buffers: list[Any], error: Exception) -> StepFailedError:
        reason = f"{type(error).__name__}: {error}"
        for buffer in buffers:
            if isinstance(buffer.array, jax.Array) and buffer.array.is_deleted():
                buffer.array = Lost(f"this tensor's memory was handed to a step that then failed: {reason}")
        return StepFailedError(reason)


_array = attrgetter("array")


def _lies(array: jax.Array, layout: Any) -> bool:
    """Whether an array is laid out over the mesh as the program has it."""
    return layout is not None and array.sharding.is_equivalent_to(layout, array.ndim)


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """What gives the items at `places`, in one call."""
    if len(places) < 2:  # `itemgetter` of one gives no tuple
        return lambda items: [items[place] for place in places]
    getter = itemgetter(*places)
    return lambda items: list(getter(items))


def uploaded(numbers: np.ndarray) -> Any:
    """Lifted numbers as an array of the device, for calls that have the same ones again; on a mesh as they are.

    The array is not committed to the device: to JAX a committed one would be another kind of argument, and a reason to
    compile again.
    """
    if mesh.active is not None:
        return numbers
    with compat.x64(), jax.default_device(runtime.jax_device()):
        return jax.device_put(numbers)


_nobody = Buffer(None)  # type: ignore[arg-type]
"""Stands for an argument among the sources."""


def _changed(one: Sequence[Any], other: Sequence[Any]) -> str:
    return next((f"{a} in one, {b} in the next" for a, b in zip(one, other, strict=False) if a != b), "")


def _same(one: jax.Array, other: jax.Array) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def argument_buffer(tensor: torch.Tensor) -> Buffer:
    """The buffer of a tensor argument, with nothing pending."""
    buffer = storage.buffer_of(tensor)
    if buffer.number >= 0:
        cut.cut()
    return buffer


class Geometry(NamedTuple):
    """How a tensor lies in its buffer."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    whole: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of `tensor`."""
        shape = tuple(tensor.shape)
        whole = shape == storage.buffer_of(tensor).spec.shape and tensor.is_contiguous()
        return cls(shape, tensor.stride(), tensor.storage_offset(), whole)


def result(array: jax.Array, geometry: Geometry) -> torch.Tensor:
    """A fresh tensor over `array`."""
    tensor = transfer.wrap(array)
    if geometry.whole:
        return tensor
    store = tensor.untyped_storage()
    return storage.set_geometry(tensor, store, geometry.offset, geometry.shape, geometry.strides)
