"""The trace: the operations recorded since the last flush, as a flat list of integers.

* A `Spec` is a shape and a dtype, interned, so that comparing and hashing it compares addresses.
* A `Buffer` is the value behind one torch storage: an array on the device, or the number of a value in the trace.
* An `Instruction` is one operation specialized to the specs and constants of a call.
* The `Trace` stores, for each recorded operation, an instruction id and the numbers of its inputs.

A tensor stores no value: its storage has the buffer.  Views share their base's storage and so its buffer; aliasing,
``.data =``, ``set_`` and ``swap_tensors`` are PyTorch's.  A tensor whose geometry is not its buffer's is read and
written with one strided instruction.  An in-place write only gives the buffer a new value number.

A trace belongs to the thread that records it.  `trace` is the one of the thread that holds its lock: another thread
that enters puts its own in the place (`_enters`).  A buffer's number counts in one trace, that of its `generation`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any, ParamSpec, Protocol, TypeVar

import jax
import numpy as np
import torch

from xla_amp.common import events, interrupts
from xla_amp.errors import DeviceError, StepFailedError
from xla_amp.lazy.base import forks, private_api
from xla_amp.lazy.base.dtypes import TO_NUMPY
from xla_amp.lowering import OneHot, Permuted
from xla_amp.lowering.operand import as_dtype, rounded_to_half
from xla_amp.torch_common import module_paths

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
Numbers = tuple[int, ...]
_interning = threading.RLock()
"""Held while a spec or an instruction is interned, because a loader's thread may create specs during recording."""


class Spec:
    """Shape and dtype of a value; one object for each pair."""

    __slots__ = ("__weakref__", "dtype", "numpy_dtype", "parameter", "shape", "size", "zeros")

    def __init__(self, shape: Numbers, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.numpy_dtype = TO_NUMPY[dtype]
        size = 1
        for extent in shape:
            size *= extent
        self.size = size
        self.parameter = Instruction("parameter", None, (self,), 0)
        self.zeros: Instruction | None = None

    def struct(self) -> jax.ShapeDtypeStruct:
        """The spec as JAX's struct; call with 64-bit types enabled."""
        return jax.ShapeDtypeStruct(self.shape, self.numpy_dtype)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


_specs: weakref.WeakValueDictionary[tuple[Numbers, torch.dtype], Spec] = weakref.WeakValueDictionary()


def spec(shape: Any, dtype: torch.dtype) -> Spec:
    """The one `Spec` of this shape and dtype."""
    found = _specs.get((shape, dtype))
    if found is None:
        with _interning:
            return _new_spec(tuple(shape), dtype)
    return found


def _new_spec(shape: Numbers, dtype: torch.dtype) -> Spec:
    found = _specs.get((shape, dtype))
    if found is None:
        if dtype not in TO_NUMPY:
            legal = ", ".join(map(str, TO_NUMPY))
            raise DeviceError(f"dtype {dtype} does not exist on the device 'jax'; legal: {legal}")
        found = _specs[shape, dtype] = Spec(shape, dtype)
    return found


_NONE: Mapping[Any, Any] = MappingProxyType({})


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Instruction:
    """An operation with everything that shapes its program; the trace stores its id."""

    name: str
    emit: Callable[..., Any] | None
    """``emit(context, inputs, floats, ints, rng)`` returns one array for each result; None marks a parameter."""
    outs: tuple[Spec | None, ...]
    inputs: int
    floats: int = 0
    ints: int = 0
    random: bool = False
    takes: tuple[type, ...] = ()
    """Classes of deferred inputs (as `Permuted`) that `emit` accepts; other inputs are arrays."""
    collective: bool = False
    """Whether this is a collective operation of processes that train together."""
    minor: Mapping[str, Mapping[int, Numbers]] = dataclasses.field(default_factory=lambda: _NONE)
    """Platform -> position of an input -> its minor-most dimensions in memory (`memory_layout`)."""
    constants: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _NONE)
    """Arguments that are part of the program, by name, to say in which of them two programs differ."""
    family: Family | None = None
    numbers: tuple[float, ...] = ()
    """The numbers, such as the start of a slice, by which this differs from others of its family."""
    traced: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)
    """Context -> `emit` as JAX has traced it (`compile`)."""
    location: str = dataclasses.field(init=False)
    """``file:line`` of the user's code that recorded it first; empty in a backward pass."""
    id: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.location = events.user_location()
        self.id = next(_ids)
        instructions[self.id] = self

    def forget(self) -> None:
        """Makes the next call create another instruction: this one has failed, and `location` would be wrong."""
        for cache in _caches:
            for key in [key for key, instruction in cache.items() if instruction is self]:
                del cache[key]


_ids = itertools.count()
instructions: dict[int, Instruction] = {}
"""Instructions by id: those that were recorded since the last `forget_unused`, and those of the programs kept."""
_unused: weakref.WeakValueDictionary[int, Instruction] = weakref.WeakValueDictionary()
"""Instructions that no program used at the last `forget_unused`, while another object has them."""
_caches: list[dict[Any, Instruction]] = []


def instruction_cache() -> dict[Any, Instruction]:
    """A dict for instructions, by what distinguishes them; `forget_unused` removes items."""
    cache: dict[Any, Instruction] = {}
    _caches.append(cache)
    return cache


def forget_unused(used: Set[int]) -> None:
    """Drops the instructions whose id is not in `used`, and the specs that only they had."""
    for cache in _caches:
        for key in [key for key, instruction in cache.items() if instruction.id not in used]:
            del cache[key]
    for number in list(instructions):  # a copy: a loader's thread may add some
        if number not in used:
            _unused[number] = instructions.pop(number)


def instruction_of(number: int) -> Instruction:
    """The instruction with the id `number`."""
    found = instructions.get(number)
    return _unused[number] if found is None else found


class Family:
    """Instructions that differ in a few numbers only, and the one that takes these numbers as data.

    An instruction with constants is the faster one, as XLA folds the slices of a fused projection.  `dynamic_numbers`
    decides at a flush where the other one is needed.
    """

    __slots__ = ("__weakref__", "_dynamic", "_make", "number")

    def __init__(self, make: Callable[[], Instruction]) -> None:
        """`make` returns the instruction whose `floats` and `ints` end with the constants of the others."""
        self._make = make
        self._dynamic: Instruction | None = None
        self.number = ~next(_families)
        """A negative number, which no instruction has."""

    def dynamic(self) -> Instruction:
        """The instruction that takes the numbers as data."""
        if self._dynamic is None:
            self._dynamic = self._make()
            self._dynamic.family = self  # which lives as long as one of its instructions
        return self._dynamic


_families = itertools.count(1)


FIRST_GLANCE = 4
"""Count of values at which `loops` first looks at a trace."""
FIRST_LOOK = 32
"""Count of values at which it first looks whether a trace repeats."""


class Poisoned:
    """Stored in a buffer instead of a value that a failed step should have computed."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Unrecorded(Protocol):
    """A value that is recorded when an operation first reads it, because its shape would make another program."""

    def record(self) -> int:
        """Records the value; returns its number."""

    def converted(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor with the value in another dtype, not recorded either."""


class Owner:
    """A thread that records; autograd's threads record for the one that called ``backward``."""

    __slots__ = ("__weakref__", "parts")

    def __init__(self) -> None:
        self.parts: tuple[Any, ...] | None = None
        """The parts of its trace (`_PARTS`) while another thread's is in the place; None if it has recorded nothing."""


class Generation:
    """A trace from its first operation to its program."""

    __slots__ = ("owner",)

    def __init__(self, owner: Owner) -> None:
        self.owner: Owner | None = owner
        """The thread that records it; None once it has run."""


class Buffer:
    """The value behind one storage.

    While `number` is not negative, the value is computed by the trace.  Otherwise `array` is the value.
    """

    __slots__ = ("__weakref__", "address", "array", "at", "external", "generation", "raw", "spec", "unrecorded")

    def __init__(
        self, spec: Spec, at: int = -1, array: jax.Array | None = None, generation: Generation | None = None
    ) -> None:
        self.spec = spec
        self.external: jax.Array | None = None
        """`array` again, if JAX code may hold it too: this second reference prevents its donation to a program."""
        self.at = at
        """Number of the value in the trace `generation`."""
        self.generation = generation
        """The last trace that read or wrote the buffer."""
        self.array: Any = array
        """A `jax.Array`, `Poisoned`, or None for memory that was never written; `store` replaces it."""
        self.address = 0
        """What the storage's ``data_ptr()`` returns, or 0 while nothing has asked (`tensors.storages`)."""
        self.raw: torch.Tensor | None = None
        """Bytes on the host, from a checkpoint: they are uploaded with the dtype of the first tensor set on them."""
        self.unrecorded: Unrecorded | None = None
        """The value as long as there is neither a number nor an array."""

    @property
    def number(self) -> int:
        """Number of the value in the trace, or -1; the caller holds the trace's lock.

        A value that another thread's trace computes is finished first.
        """
        return self.at if self.generation is trace.generation else _number_here(self)

    @number.setter
    def number(self, number: int) -> None:
        self.at, self.generation = number, trace.generation if number >= 0 else None

    def store(self, value: jax.Array | Poisoned | None) -> None:
        """Replaces the array, and lets go of the old one."""
        self.array = value
        if self.external is not value:
            self.external = None


def store(buffers: Iterable[Buffer], values: Iterable[jax.Array]) -> None:
    """`Buffer.store` of each: a step stores thousands."""
    for buffer, value in zip(buffers, values, strict=True):
        buffer.array = value
        if buffer.external is not value:
            buffer.external = None


class Trace:
    """Operations that the thread that holds the lock has recorded since its last flush."""

    __slots__ = (
        "code",
        "computed",
        "count",
        "draws",
        "eager",
        "floats",
        "generation",
        "generators",
        "guards",
        "inputs",
        "ints",
        "known",
        "limit",
        "listeners",
        "lock",
        "loop",
        "most",
        "nodes",
        "owner",
        "parameter_numbers",
        "parameters",
        "random",
        "reads",
        "seedings",
        "step",
        "stream",
        "streams",
        "waiting",
    )

    def __init__(self) -> None:
        self.lock = interrupts.lock
        """Held while one operation is recorded and during a flush.  Handlers of signals wait for its release
        (`interrupts`)."""
        self.eager = False
        """Whether each operation runs as soon as it is recorded (``XLA_AMP_EAGER``)."""
        self.most = sys.maxsize
        """Count of values at which the trace is flushed in any case."""
        self.begin(Owner())

    def begin(self, owner: Owner) -> None:
        """Begins what `owner` records."""
        self.owner = owner
        """The thread whose trace this is."""
        self.generation = Generation(owner)
        """This trace; each flush starts the next one."""
        self.guards: list[Any] = []
        """Of the blocks open whose writes may be undone (`rollback`)."""
        self.listeners: dict[Any, Any] = {}
        """Of this thread, by `Point`."""
        self.waiting: list[Any] = []
        """Reads of values that this trace computes (`tensors.later`)."""
        self.reads = 0
        """How often this thread has waited for a value."""
        self.step: Any = None
        """Where this thread is in its step (`steps.step_marker`)."""
        self.loop: Any = None
        """Where it is in a loop (`steps.loops`)."""
        self.random: tuple[int, int] | None = None
        """(seed, offset) of this thread's random numbers (`generator`)."""
        self.seedings = 0
        """How often this thread has set a seed."""
        self.clear()
        self.limit = -1  # `loops` looks at the first operation of a thread

    def clear(self) -> None:
        """Empties the trace."""
        self.generation.owner = None
        self.generation = Generation(self.owner)
        self.code: list[int] = []
        self.count = 0
        """Count of values; the number of the next one."""
        self.computed: list[weakref.ref[Buffer]] = []
        """Buffers, not among `parameters`, whose value this trace computes."""
        self.parameters: list[Buffer] = []
        """Buffers whose array is an input of the program, in the order of first use."""
        self.parameter_numbers: list[int] = []
        self.inputs: dict[int, int] = {}
        """Id of a parameter -> its number."""
        self.floats: list[float] = []
        """Python numbers that are inputs of the program, so a new learning rate does not recompile."""
        self.ints: list[int] = []
        self.streams: list[tuple[int, int]] = []
        """(seed, offset) pairs of the random operations of this trace."""
        self.draws = 0
        """Random operations since the device generator's last stream began."""
        self.stream = 0
        """Index in `streams` of the device generator's last one."""
        self.generators: list[Any] = []
        """Other generators that random operations of this trace draw from."""
        self.limit = min(FIRST_GLANCE, self.most)
        """Count of values at which `loops` looks whether the program ends."""
        self.known: dict[int, np.ndarray] = {}
        """Values that the host has computed too (`host_eval`), by number."""
        self.nodes: tuple[int, int] | None = (threading.get_ident(), private_api.autograd_nodes())
        """The thread that began this trace, and its count of autograd's nodes then: -1 if a read cut the forward pass
        of a training step; None for an optimizer's step."""

    def numbers(self) -> list[int]:
        """The present number of each parameter; one that another thread has read or written since has its first one."""
        now, pairs = self.generation, zip(self.parameters, self.parameter_numbers, strict=True)
        return [buffer.at if buffer.generation is now else number for buffer, number in pairs]

    def results(self) -> list[Buffer]:
        """The buffers in `computed` that exist."""
        found = [reference() for reference in self.computed]
        return [buffer for buffer in found if buffer is not None and buffer.generation is self.generation]


trace = Trace()
_PARTS = tuple(name for name in Trace.__slots__ if name not in ("lock", "eager", "most", "owner"))
_parts = operator.attrgetter(*_PARTS)
_CODE, _INPUTS = map(_PARTS.index, ("code", "inputs"))


# ---- threads ---------------------------------------------------------------------------------------------------------


class OwnPoint(events.Point[_Arguments, _Result]):
    """A point whose listeners hear of what the thread that has subscribed them records."""

    @property
    def listeners(self) -> tuple[Any, ...]:
        """Those of this thread."""
        with trace.lock:
            found: tuple[Any, ...] = trace.listeners.get(self, ())
            return found

    @listeners.setter
    def listeners(self, listeners: tuple[Any, ...]) -> None:
        with trace.lock:
            trace.listeners[self] = listeners

    def subscribe(self, listener: Any) -> None:
        with trace.lock:  # before the lock of events, as everywhere
            super().subscribe(listener)

    def unsubscribe(self, listener: Any) -> None:
        with trace.lock:
            super().unsubscribe(listener)


def heard(*points: OwnPoint[..., Any]) -> bool:
    """Whether something listens to one of `points` on this thread."""
    with trace.lock:
        return any(map(trace.listeners.get, points))


@events.Point
def must_run() -> None:
    """The trace must run, because another thread reads what it computes."""


class _Here(threading.local):
    """Of one thread."""

    def __init__(self) -> None:
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        self.owner = None if foreign and module_paths.in_backward() else Owner()
        """None for a thread of autograd."""
        self.end = _End()


class _End:
    """Lets the system use the number of a thread again: the next thread that has it is another owner."""

    def __del__(self, lock: interrupts.Lock = interrupts.lock) -> None:
        lock.thread = 0


_here = _Here()
_here.owner = trace.owner
_owners = weakref.WeakSet([trace.owner])
"""Threads that record, or have left a trace that something needs."""
_passes: dict[bool, Owner] = {}
"""Whose backward passes run: of an output on the device (one at a time), and the newest other one."""


def this_thread() -> Owner:
    """The owner of what this thread records."""
    return _here.owner or _passes.get(True) or _passes.get(False) or trace.owner


@contextlib.contextmanager
def backward(on_device: bool) -> Iterator[None]:
    """Context manager for a backward pass that this thread calls: what autograd's threads record is this thread's."""
    owner = this_thread()
    if _passes.get(on_device) is owner:  # a pass inside of a pass
        yield
        return
    _passes[on_device] = owner
    trace.lock.thread = 0  # autograd's thread may have recorded for another one
    try:
        yield
    finally:
        if _passes.get(on_device) is owner:
            del _passes[on_device]


def _enters() -> None:
    """This thread holds the lock, and was not the last one that did: the trace becomes its own."""
    owner = this_thread()
    if owner is not trace.owner:
        _put(owner)
    trace.lock.thread = threading.get_ident()


def _put(owner: Owner) -> None:
    trace.owner.parts = _parts(trace)
    if owner.parts is None:
        _owners.add(owner)
        trace.begin(owner)
    else:
        trace.owner = owner
        for name, part in zip(_PARTS, owner.parts, strict=True):
            setattr(trace, name, part)
        owner.parts = None


interrupts.changes_hands.subscribe(_enters)


def _record_nothing() -> None:
    """In a forked child each kernel calls `flush`, which raises."""
    trace.limit = trace.most = -1


forks.in_child.subscribe(_record_nothing)


def recorded() -> set[int]:
    """The instructions that any thread has recorded and that have not run, by id; other numbers may be among them."""
    return set(trace.code).union(*(owner.parts[_CODE] for owner in others() if owner.parts))


def others() -> list[Owner]:
    """The threads whose trace is not in the place and not empty."""
    return [owner for owner in _owners if owner.parts is not None and owner.parts[_CODE]]


def _number_here(buffer: Buffer) -> int:
    """Number of a buffer that the trace was not the last one to read or write, or -1."""
    generation = buffer.generation
    owner = generation and generation.owner
    if owner and owner.parts and owner.parts[_INPUTS].get(id(buffer)) != buffer.at:  # it computes the value
        _run(owner)
    number = trace.inputs.get(id(buffer), -1)
    if number >= 0:
        buffer.number = number
    return number


def _run(owner: Owner) -> None:
    """Runs the trace of another thread.

    Until it has run, this thread counts as that one.  When a third thread ends or calls ``backward``, this thread looks
    again whose trace it has to use, and it must find the same one.
    """
    mine, before = trace.owner, _here.owner
    _here.owner = owner
    _put(owner)
    try:
        must_run()
    finally:
        _here.owner = before
        _put(mine)


def settle(buffers: Iterable[Buffer]) -> None:
    """Runs the traces of other threads that compute the values of `buffers`."""
    if others():
        for buffer in buffers:
            if buffer.generation is not trace.generation:
                _number_here(buffer)


def release(buffers: Iterable[Buffer], copy: Callable[[Any], Any]) -> None:
    """Before `buffers` get other arrays: traces of other threads that have read them keep copies of these."""
    for owner in others():
        parts = dict(zip(_PARTS, owner.parts or (), strict=True))
        inputs, parameters, generation = parts["inputs"], parts["parameters"], parts["generation"]
        for buffer in buffers:
            if (number := inputs.pop(id(buffer), -1)) < 0:
                continue
            kept = Buffer(buffer.spec, number, copy(buffer.array), generation)
            kept.external = kept.array  # no program takes it, as none would take the buffer's
            inputs[id(kept)] = number
            parameters[parts["parameter_numbers"].index(number)] = kept
            if buffer.generation is generation:
                buffer.generation = None


# ---- recording -------------------------------------------------------------------------------------------------------


def add_parameter(buffer: Buffer) -> int:
    """Records the buffer's array as an input, or zeros for memory never written; returns the value's number.

    The trace has not read it, or was not the last one to read it.
    """
    if buffer.generation is not None and (number := buffer.number) >= 0:
        return number
    array = buffer.array
    if (
        not trace.parameters and trace.nodes is not None and trace.nodes[1] >= 0
    ):  # before it there are factories and random numbers only
        trace.nodes = threading.get_ident(), private_api.autograd_nodes()
    number = trace.count
    if array is None:
        if buffer.unrecorded is not None:
            assign(buffer, number := buffer.unrecorded.record())
            return number
        instruction = buffer.spec.zeros or _zeros(buffer.spec)
        trace.computed.append(weakref.ref(buffer))
    elif type(array) is Poisoned:
        raise StepFailedError(array.reason)
    else:
        instruction = buffer.spec.parameter
        trace.parameters.append(buffer)
        trace.parameter_numbers.append(number)
        trace.inputs[id(buffer)] = number
    instructions[instruction.id] = instruction  # the spec has it, not a cache that `forget_unused` knows
    trace.code.append(instruction.id)
    buffer.at, buffer.generation = number, trace.generation
    trace.count = number + 1
    return number


def _zeros(spec: Spec) -> Instruction:
    def emit(context: Any, inputs: Any, floats: Any, ints: Any, rng: Any) -> list[Any]:
        return [jax.numpy.zeros(spec.shape, spec.numpy_dtype)]

    spec.zeros = Instruction("zeros", emit, (spec,), 0)
    return spec.zeros


def record(instruction: Instruction, *inputs: int) -> int:
    """Appends an instruction; returns the number of its first result."""
    instructions[instruction.id] = instruction  # no cache need have it
    trace.code.append(instruction.id)
    trace.code.extend(inputs)
    number = trace.count
    trace.count = number + len(instruction.outs)
    return number


def assign(buffer: Buffer, number: int) -> None:
    """Gives the whole buffer the value `number`."""
    if buffer.number < 0:
        trace.computed.append(weakref.ref(buffer))
    buffer.at, buffer.generation = number, trace.generation


conversions: dict[tuple[Spec, torch.dtype | None], Instruction] = instruction_cache()
"""(spec, target dtype) -> the instruction of that conversion."""


def cast(number: int, source: Spec, dtype: torch.dtype) -> tuple[int, Spec]:
    """Records a conversion of value `number` to `dtype`, rounding as an eager torch cast does."""
    if source.dtype is dtype:
        return number, source
    instruction = conversions.get((source, dtype))
    if instruction is None:
        instruction = conversions[source, dtype] = _cast_instruction(spec(source.shape, dtype))
    return record(instruction, number), instruction.outs[0]  # type: ignore[return-value]


def _cast_instruction(target: Spec) -> Instruction:
    def emit(context: Any, inputs: Any, *_: Any) -> list[Any]:
        (x,) = inputs
        if isinstance(x, Permuted):  # stays a transpose that a contraction can fold
            return [Permuted(rounding_cast(x.base, target.numpy_dtype), x.permutation)]
        if isinstance(x, OneHot):
            return [dataclasses.replace(x, values=rounding_cast(x.values, target.numpy_dtype))]
        return [rounding_cast(x, target.numpy_dtype)]

    return Instruction("_to_copy", emit, (target,), 1, takes=(Permuted, OneHot))


def rounding_cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x` in `dtype`.  XLA deletes a convert pair such as f32 -> bf16 -> f32, so narrowing rounds explicitly."""
    if dtype == np.bool_:
        return x != 0
    if jax.numpy.issubdtype(x.dtype, np.complexfloating) and not jax.numpy.issubdtype(dtype, np.complexfloating):
        x = jax.numpy.real(x)
    if jax.numpy.issubdtype(x.dtype, np.floating):
        if dtype.itemsize == 2 < x.dtype.itemsize and jax.numpy.issubdtype(dtype, np.floating):
            x = rounded_to_half(
                jax.lax.convert_element_type(x, np.float32), dtype
            )  # float64 too goes by way of float32
        elif dtype.kind in "iu" and dtype.itemsize < 4:
            # torch's small integers wrap around, and what not even the wide type holds is 0: XLA would saturate.
            x = x.astype(np.float32) if x.dtype.itemsize == 2 else x
            x = jax.numpy.where(abs(x) < 2.0 ** (63 if dtype.kind == "u" else 31), x, 0)
            x = jax.lax.convert_element_type(x, np.int64 if dtype.kind == "u" else np.int32)
    return as_dtype(x, dtype)


_broadcasts: dict[tuple[Spec, Numbers], Instruction] = instruction_cache()


def broadcast(number: int, source: Spec, shape: Any) -> tuple[int, Spec]:
    """Records a broadcast of value `number` to `shape`."""
    if source.shape == shape:
        return number, source
    shape = tuple(shape)
    instruction = _broadcasts.get((source, shape))
    if instruction is None:
        if torch.broadcast_shapes(source.shape, shape) != shape:
            raise RuntimeError(f"a value of shape {list(source.shape)} does not broadcast to the shape {list(shape)}")
        target = spec(shape, source.dtype)
        instruction = _broadcasts[source, shape] = Instruction(
            "broadcast_to", lambda context, inputs, *_: [jax.numpy.broadcast_to(inputs[0], shape)], (target,), 1
        )
    return record(instruction, number), instruction.outs[0]  # type: ignore[return-value]
