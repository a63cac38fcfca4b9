"""The trace: the operations recorded since the last flush, as a flat list of integers.

* A `Spec` is a shape and a dtype, interned, so that comparing and hashing it compares addresses.
* A `Buffer` is the value behind one torch storage: an array on the device, or the number of a value in the trace.
* An `Instruction` is one operation specialized to the specs and constants of a call.
* The `Trace` stores, for each recorded operation, an instruction id and the numbers of its inputs.

A tensor stores no value: its storage has the buffer.  Views share their base's storage and so its buffer; aliasing,
``.data =``, ``set_`` and ``swap_tensors`` are PyTorch's.  A tensor whose geometry is not its buffer's is read and
written with one strided instruction.  An in-place write only gives the buffer a new value number.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np
import torch

from xla_amp.common import events, interrupts
from xla_amp.errors import DeviceError, StepFailedError
from xla_amp.lazy import private_api
from xla_amp.lazy.dtypes import TO_NUMPY
from xla_amp.lowering import OneHot, Permuted
from xla_amp.lowering.operand import as_dtype, rounded_to_half

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


class Instruction:
    """An operation with everything that shapes its program; the trace stores its id."""

    __slots__ = (
        "__weakref__",
        "collective",
        "constants",
        "emit",
        "family",
        "floats",
        "id",
        "inputs",
        "ints",
        "location",
        "minor",
        "name",
        "numbers",
        "outs",
        "random",
        "takes",
        "traced",
    )

    def __init__(
        self,
        name: str,
        emit: Callable[..., Any] | None,
        outs: tuple[Spec | None, ...],
        inputs: int,
        floats: int = 0,
        ints: int = 0,
        random: bool = False,
        takes: tuple[type, ...] = (),
        collective: bool = False,
        minor: Mapping[str, Mapping[int, Numbers]] = MappingProxyType({}),
        constants: Mapping[str, Any] = MappingProxyType({}),
        family: Family | None = None,
        numbers: tuple[float, ...] = (),
    ) -> None:
        self.name = name
        self.emit = emit
        """``emit(context, inputs, floats, ints, rng)`` returns one array for each result; None marks a parameter."""
        self.outs = outs
        self.inputs = inputs
        self.floats = floats
        self.ints = ints
        self.random = random
        self.takes = takes
        """Classes of deferred inputs (as `Permuted`) that `emit` accepts; other inputs are arrays."""
        self.collective = collective
        """Whether this is a collective operation of processes that train together."""
        self.minor = minor
        """Platform -> position of an input -> its minor-most dimensions in memory (`memory_layout`)."""
        self.constants = constants
        """Arguments that are part of the program, by name, to say in which of them two programs differ."""
        self.traced: dict[Any, Any] = {}
        """Context -> `emit` as JAX has traced it (`compile`)."""
        self.family = family
        self.numbers = numbers
        """The numbers, such as the start of a slice, by which this differs from others of its family."""
        self.location = events.user_location()
        """``file:line`` of the user's code that recorded it first; empty in a backward pass."""
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
    """Drops the instructions whose id is not in `used`, and the specs that only they had.  The trace is empty."""
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


class Buffer:
    """The value behind one storage.

    While `number` is not negative, the value is computed by the trace.  Otherwise `array` is the value.
    """

    __slots__ = ("__weakref__", "address", "array", "external", "number", "raw", "spec", "unrecorded")

    def __init__(self, spec: Spec, number: int = -1, array: jax.Array | None = None) -> None:
        self.spec = spec
        self.external: jax.Array | None = None
        """`array` again, if JAX code may hold it too: this second reference prevents its donation to a program."""
        self.number = number
        """Number of the value in the trace, or -1."""
        self.array: Any = array
        """A `jax.Array`, `Poisoned`, or None for memory that was never written; `store` replaces it."""
        self.address = 0
        """What the storage's ``data_ptr()`` returns, or 0 while nothing has asked (`tensors.storages`)."""
        self.raw: torch.Tensor | None = None
        """Bytes on the host, from a checkpoint: they are uploaded with the dtype of the first tensor set on them."""
        self.unrecorded: Unrecorded | None = None
        """The value as long as there is neither a number nor an array."""

    def store(self, value: jax.Array | Poisoned | None) -> None:
        """Replaces the array, and lets go of the old one."""
        self.array = value
        if self.external is not value:
            self.external = None


class Trace:
    """Operations recorded since the last flush."""

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
        "ints",
        "known",
        "limit",
        "lock",
        "most",
        "nodes",
        "parameter_numbers",
        "parameters",
        "stream",
        "streams",
    )

    def __init__(self) -> None:
        self.lock = interrupts.lock
        """Held while one operation is recorded and during a flush; autograd records from another thread.  Handlers of
        signals wait for its release (`interrupts`)."""
        self.code: list[int] = []
        self.count = 0
        """Count of values; the number of the next one."""
        self.computed: list[weakref.ref[Buffer]] = []
        """Buffers, not among `parameters`, whose value this trace computes."""
        self.parameters: list[Buffer] = []
        """Buffers whose array is an input of the program, in the order of first use."""
        self.parameter_numbers: list[int] = []
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
        self.generation = 0
        """Number of this trace; each flush starts the next one."""
        self.guards: list[Any] = []
        """Of the blocks open whose writes may be undone (`rollback`)."""
        self.eager = False
        """Whether each operation runs as soon as it is recorded (``XLA_AMP_EAGER``)."""
        self.limit = sys.maxsize
        """Count of values at which `loops` looks whether the program ends."""
        self.most = sys.maxsize
        """Count of values at which the trace is flushed in any case."""
        self.known: dict[int, np.ndarray] = {}
        """Values that the host has computed too (`host_eval`), by number."""
        self.nodes: tuple[int, int] | None = None
        """The thread that began this trace, and its count of autograd's nodes then; None for an optimizer's step."""

    def clear(self) -> None:
        """Empties the trace."""
        self.truncate((0, 0, 0, *(0 for _ in self._lists())))
        self.limit = min(FIRST_GLANCE, self.most)
        self.nodes = threading.get_ident(), private_api.autograd_nodes()
        self.generation += 1

    def position(self) -> Numbers:
        """The present end of the trace, for `truncate`."""
        return (self.count, self.draws, self.stream, *map(len, self._lists()))

    def truncate(self, position: Numbers) -> None:
        """Removes what was recorded after `position`.  Lists stay the same objects: kernels hold references to them."""
        self.count, self.draws, self.stream, *lengths = position
        for part, length in zip(self._lists(), lengths, strict=True):
            del part[length:]
        for number in [number for number in self.known if number >= self.count]:
            del self.known[number]

    def _lists(self) -> tuple[list[Any], ...]:
        return (
            self.code, self.computed, self.parameters, self.parameter_numbers, self.floats, self.ints, self.streams,
            self.generators,
        )  # fmt: skip

    def buffers(self) -> Iterator[Buffer]:
        """The buffers that exist and have a number."""
        yield from (buffer for buffer in self.parameters if buffer.number >= 0)
        yield from (buffer for ref in self.computed if (buffer := ref()) is not None and buffer.number >= 0)


trace = Trace()


def add_parameter(buffer: Buffer) -> int:
    """Records the buffer's array as an input, or zeros for memory never written; returns the value's number."""
    array = buffer.array
    if not trace.parameters and trace.nodes is not None:  # before it there are factories and random numbers only
        trace.nodes = threading.get_ident(), private_api.autograd_nodes()
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
        trace.parameter_numbers.append(trace.count)
    instructions[instruction.id] = instruction  # the spec has it, not a cache that `forget_unused` knows
    trace.code.append(instruction.id)
    buffer.number = number = trace.count
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
    buffer.number = number


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
