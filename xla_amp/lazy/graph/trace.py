"""The tape: what has been recorded since the last cut, as a flat list of integers.

Four nouns carry the engine:

* a `Spec` is a shape and a dtype, interned, so that comparing and hashing it is comparing addresses;
* a `Buffer` is the value behind one torch storage: an array on the device, or the number of a value on the tape;
* an `Instruction` is one operation specialised to the specs and constants it was called with;
* the `Tape` holds, per recorded operation, an instruction id followed by the numbers of its inputs.

Tensors hold no value of their own.  Views share their base's storage and so its buffer; aliasing, ``.data =``,
``set_`` and ``swap_tensors`` are PyTorch's own; a tensor whose geometry is not its buffer's is read and written through
one strided instruction.  An in-place write gives the buffer a new value number, nothing else.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np
import torch

from xla_amp.errors import DeviceError, StepFailedError
from xla_amp.lazy.dtypes import TO_NUMPY
from xla_amp.lowering import Permuted

Numbers = tuple[int, ...]
_interning = threading.RLock()
"""Held while a spec or an instruction is given its identity: a loader's thread meets new shapes beside the tape."""


class Spec:
    """Shape and dtype of a value; one object per pair."""

    __slots__ = ("dtype", "leaf", "numpy_dtype", "shape", "size", "zeros")

    def __init__(self, shape: Numbers, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.numpy_dtype = TO_NUMPY[dtype]
        size = 1
        for extent in shape:
            size *= extent
        self.size = size
        self.leaf = Instruction("leaf", None, (self,), 0)
        self.zeros: Instruction | None = None

    def struct(self) -> jax.ShapeDtypeStruct:
        """The spec in JAX's words (call with 64-bit types enabled)."""
        return jax.ShapeDtypeStruct(self.shape, self.numpy_dtype)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


_specs: dict[tuple[Numbers, torch.dtype], Spec] = {}


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
    """An operation with everything that shapes its program; its id stands for all of that on the tape."""

    __slots__ = (
        "collective",
        "emit",
        "floats",
        "id",
        "inputs",
        "ints",
        "minor",
        "name",
        "outs",
        "random",
        "takes",
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
    ) -> None:
        self.name = name
        self.emit = emit
        """``emit(context, inputs, floats, ints, rng)`` gives one array per result; ``None`` marks a leaf."""
        self.outs = outs
        self.inputs = inputs
        self.floats = floats
        self.ints = ints
        self.random = random
        self.takes = takes
        """Kinds of inputs that `emit` takes as they are; others come as arrays."""
        self.collective = collective
        """Whether processes that train together meet here."""
        self.minor = minor
        """Platform -> place among the inputs -> dimensions that lie closest together in memory (`arrangement`)."""
        with _interning:
            self.id = len(instructions)
            instructions.append(self)


instructions: list[Instruction] = []
"""Every instruction ever made, by id."""


class Buffer:
    """The value behind one storage."""

    __slots__ = ("__weakref__", "array", "number", "raw", "shared", "spec")

    def __init__(self, spec: Spec, number: int = -1, array: jax.Array | None = None) -> None:
        self.spec = spec
        self.shared: jax.Array | None = None
        """`array` once more, where others may know it (`Shared`)."""
        self.number = number
        """Number of its value on the tape, or -1: then `array` is the value (``None``: memory never written)."""
        self.array = array
        self.raw = False
        """Bytes from a checkpoint that take the dtype of the first tensor set on them."""


class Shared(Buffer):
    """A buffer whose array others may know: a second reference keeps it from being handed over to a program.

    With another array it becomes a buffer like any other.
    """

    __slots__ = ()

    def __init__(self, spec: Spec, array: jax.Array) -> None:
        super().__init__(spec)
        self.shared = self.array = array

    @property
    def array(self) -> Any:  # type: ignore[override]
        """As of any buffer."""
        return _array.__get__(self)

    @array.setter
    def array(self, value: Any) -> None:
        _array.__set__(self, value)
        if value is not self.shared:
            self.shared = None
            self.__class__ = Buffer  # type: ignore[assignment]


_array: Any = Buffer.__dict__["array"]


class Lent(Buffer):
    """A buffer whose array a captured step holds between its replays: it has none, and asking for it brings it back.

    Buffers become this and back in place.  A class of its own, because Python reads every attribute of a class that
    has a `__getattr__` several times slower, and kernels read those of buffers.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name != "array":
            raise AttributeError(f"a Buffer has no {name!r}")
        with tape.lock:
            for borrower in tuple(borrowers):
                borrower.give_back()
            return object.__getattribute__(self, name)


def lend(buffer: Buffer) -> None:
    """Empties `buffer`, whose array the caller has."""
    buffer.__class__ = Lent  # first: other threads may be reading
    del buffer.array


def take_back(buffer: Buffer, array: jax.Array | None) -> None:
    """Ends `lend`."""
    buffer.array = array
    if buffer.shared is not array:
        buffer.shared = None
    buffer.__class__ = Buffer if buffer.shared is None else Shared


class Borrower(Protocol):
    """Who holds the arrays of buffers for a while (`xla_amp.lazy.capture.replay`)."""

    def give_back(self) -> None:
        """Puts each of them into its buffer."""


borrowers: list[Borrower] = []


def reclaim(buffer: Buffer) -> None:
    """To be called before a buffer gets another array unread: a captured step must not go on with the old one."""
    _ = buffer.array


class Lost:
    """Stands in a buffer for a value that a failed step should have computed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Tape:
    """Operations recorded since the last cut."""

    __slots__ = (
        "code",
        "count",
        "draws",
        "floats",
        "fresh",
        "generation",
        "ints",
        "leaf_numbers",
        "leaves",
        "limit",
        "lock",
        "streams",
    )

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while one operation is recorded, and during a cut: autograd records from a thread of its own."""
        self.code: list[int] = []
        self.count = 0
        """Values so far; the next one's number."""
        self.fresh: list[weakref.ref[Buffer]] = []
        """Buffers that got a value here without being leaves."""
        self.leaves: list[Buffer] = []
        """Buffers whose array is an input, in the order of first use."""
        self.leaf_numbers: list[int] = []
        self.floats: list[float] = []
        """Python numbers lifted out of the program: a new learning rate is new data, not a new executable."""
        self.ints: list[int] = []
        self.streams: list[tuple[int, int]] = []
        """(seed, offset) pairs from which random operations of this tape draw."""
        self.draws = 0
        """Random operations since the last stream began."""
        self.generation = 0
        """Counts the tapes: a new one begins at each cut."""
        self.limit = sys.maxsize
        """Values after which the tape is cut whatever comes, so that a loop without end runs in bounded memory."""

    def clear(self) -> None:
        """Forgets everything recorded (the lists stay the same objects: kernels hold them)."""
        for record in (self.code, self.fresh, self.leaves, self.leaf_numbers, self.floats, self.ints, self.streams):
            record.clear()
        self.count = 0
        self.draws = 0
        self.generation += 1


tape = Tape()
new_weakref = weakref.ref


def leaf(buffer: Buffer) -> int:
    """Makes the buffer's array an input of the tape (or zeros, for memory never written); returns its number."""
    array = buffer.array
    if array is None:
        instruction = buffer.spec.zeros or _zeros(buffer.spec)
        tape.fresh.append(new_weakref(buffer))
    elif type(array) is Lost:
        raise StepFailedError(array.reason)
    else:
        instruction = buffer.spec.leaf
        tape.leaves.append(buffer)
        tape.leaf_numbers.append(tape.count)
    tape.code.append(instruction.id)
    buffer.number = number = tape.count
    tape.count = number + 1
    return number


def _zeros(spec: Spec) -> Instruction:
    def emit(context: Any, inputs: Any, floats: Any, ints: Any, rng: Any) -> list[Any]:
        return [jax.numpy.zeros(spec.shape, spec.numpy_dtype)]

    spec.zeros = Instruction("zeros", emit, (spec,), 0)
    return spec.zeros


def record(instruction: Instruction, *inputs: int) -> int:
    """Appends an instruction; returns the number of its first result."""
    tape.code.append(instruction.id)
    tape.code.extend(inputs)
    number = tape.count
    tape.count = number + len(instruction.outs)
    return number


def assign(buffer: Buffer, number: int) -> None:
    """Gives the whole buffer the value `number`."""
    if buffer.number < 0:
        tape.fresh.append(new_weakref(buffer))
    buffer.number = number


conversions: dict[tuple[Spec, torch.dtype | None], Instruction] = {}
"""(spec, another dtype) -> the instruction that converts the one to the other, for those that were asked for."""


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
        return [rounding_cast(x, target.numpy_dtype)]

    return Instruction("_to_copy", emit, (target,), 1, takes=(Permuted,))


def rounding_cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x` in `dtype`.  XLA deletes a convert pair such as f32 -> bf16 -> f32, so narrowing rounds explicitly."""
    if dtype == np.bool_:
        return x != 0
    if jax.numpy.issubdtype(x.dtype, np.complexfloating) and not jax.numpy.issubdtype(dtype, np.complexfloating):
        x = jax.numpy.real(x)
    if jax.numpy.issubdtype(x.dtype, np.floating):
        if dtype.itemsize == 2 < x.dtype.itemsize and jax.numpy.issubdtype(dtype, np.floating):
            x = _round_to_half(jax.lax.convert_element_type(x, np.float32), dtype)  # float64 too goes by way of float32
        elif dtype == np.uint8:
            x = jax.lax.convert_element_type(x, np.int64)  # torch wraps a negative value around by way of int64
    return jax.lax.convert_element_type(x, dtype)


def _round_to_half(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """float32 `x`, still in float32, rounded to the nearest value that `dtype` (bfloat16 or float16) has."""
    limits = jax.numpy.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=limits.nmant)
    if dtype != np.float16:
        return rounded
    # reduce_precision with float16's own 5 exponent bits would flush its subnormals, where small gradients live.  They
    # are the multiples of 2**-24, which is the spacing of float32 at 0.5: adding that rounds to them.
    subnormal = jax.numpy.copysign((abs(x) + np.float32(0.5)) - np.float32(0.5), x)
    rounded = jax.numpy.where(abs(x) < float(limits.smallest_normal), subnormal, rounded)
    return jax.numpy.where(abs(rounded) > float(limits.max), jax.numpy.copysign(jax.numpy.inf, x), rounded)


_broadcasts: dict[tuple[Spec, Numbers], Instruction] = {}


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
