"""Read and write tensors: value numbers of operands, writes through a storage, copies to the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import torch

from xla_amp.engines import base
from xla_amp.errors import DeviceError, StepFailedError
from xla_amp.lazy.base import private_api, shapes
from xla_amp.lazy.graph.trace import (
    Buffer,
    Family,
    Instruction,
    Poisoned,
    Spec,
    Unrecorded,
    add_parameter,
    assign,
    broadcast,
    cast,
    instruction_cache,
    record,
    release,
    spec,
    trace,
)
from xla_amp.lazy.programs.execute import flush
from xla_amp.lazy.tensors import transfer
from xla_amp.lowering.operand import materialize
from xla_amp.lowering.tensor import strided

DEVICE_TYPE = base.LAZY
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types of tensors that kernels read directly; subclasses go through `operand`."""


def require_here(device: torch.device | None) -> None:
    """Raises for an index that the device type does not have.

    Raises:
        DeviceError: the index is not 0.
    """
    if device is not None and device.index:
        raise DeviceError(f"device {device} does not exist: a process has one lazy device, '{DEVICE_TYPE}:0'")


def is_lazy(value: Any) -> bool:
    """Whether a value is a tensor of the lazy device."""
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


def buffer_of(tensor: torch.Tensor) -> Buffer:
    """The buffer behind a tensor of the lazy device; a storage without a buffer gets one for memory never written.

    Raises:
        DeviceError: the tensor is on another device.
    """
    store: Any = tensor.untyped_storage()
    buffer: Buffer | None = store._xla_amp
    if buffer is None:
        if tensor.device.type != DEVICE_TYPE:
            raise _foreign(tensor)
        buffer = store._xla_amp = Buffer(spec(tuple(tensor.shape), tensor.dtype))
    return buffer


def operand(value: Any) -> tuple[int, Any]:
    """(number, key) of an operand that is not in `PLAIN`: a Python number, a CPU scalar, a subclass.

    Raises:
        DeviceError: a tensor of another device that is not a CPU scalar.
    """
    kind = type(value)
    if kind is float:
        return -1, torch.get_default_dtype()
    if kind is int:
        return -1, int
    if not isinstance(value, torch.Tensor):
        return -1, (kind, value)
    if value.device.type == DEVICE_TYPE:
        return read(value)
    if value.device.type == "cpu" and value.dim() == 0:
        buffer = Buffer(spec((), value.dtype), array=transfer.upload(value))
        return add_parameter(buffer), buffer.spec
    raise _foreign(value)


def _foreign(tensor: torch.Tensor) -> DeviceError:
    return DeviceError(
        f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE_TYPE}:0 and "
        f"{tensor.device}: a tensor of shape {list(tensor.shape)} and dtype {tensor.dtype} is on {tensor.device}. "
        "Move it with tensor.to(xla_amp.xla_device()) first"
    )


def read(tensor: torch.Tensor, of: Buffer | None = None) -> tuple[int, Spec]:
    """(number, spec) of the tensor's value; with `of`, of the elements of another buffer at its place."""
    buffer = of or buffer_of(tensor)
    value_spec = buffer.spec
    if tensor.shape == value_spec.shape and tensor.is_contiguous() and tensor.dtype is value_spec.dtype:
        return (buffer.at if buffer.generation is trace.generation else add_parameter(buffer)), value_spec
    return read_view(tensor, buffer)


def operands(
    tensors: Iterable[torch.Tensor | None], wholes: list[Buffer | None] | None = None
) -> tuple[list[int], tuple[Any, ...]]:
    """Numbers and keys of a list of tensors.

    `wholes` receives, for `write_all`, the buffer of each tensor, or None if the tensor is a view of its buffer.
    """
    numbers, keys = [], []
    tensor: Any
    for tensor in tensors:
        whole = None
        if type(tensor) in PLAIN and (buffer := tensor.untyped_storage()._xla_amp) is not None:
            value_spec = buffer.spec
            if tensor.shape == value_spec.shape and tensor.is_contiguous() and tensor.dtype is value_spec.dtype:
                number = buffer.at if buffer.generation is trace.generation else add_parameter(buffer)
                whole = buffer
            else:
                number, value_spec = read_view(tensor, buffer)
        elif tensor is None:
            number, value_spec = -1, None
        else:
            number, value_spec = operand(tensor)
        numbers.append(number)
        keys.append(value_spec)
        if wholes is not None:
            wholes.append(whole)
    return numbers, tuple(keys)


_ViewKey: TypeAlias = tuple[Spec, torch.Size, tuple[int, ...], Any, torch.dtype]
"""A buffer's spec; shape, strides, offset (an int; torch's stubs also allow a SymInt) and dtype of a view."""

_reads: dict[_ViewKey, Instruction] = instruction_cache()
_writes: dict[_ViewKey, Instruction] = instruction_cache()
_growths: dict[tuple[Spec, Spec], Instruction] = instruction_cache()


def read_view(tensor: torch.Tensor, buffer: Buffer) -> tuple[int, Spec]:
    """Records a strided read of a tensor whose geometry is not its buffer's."""
    key: _ViewKey = (buffer.spec, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
    instruction = _reads.get(key)
    if instruction is None:
        instruction = _reads[key] = _read_instruction(*key)
    number = buffer.at if buffer.generation is trace.generation else add_parameter(buffer)
    return record(instruction, number), instruction.outs[0]  # type: ignore[return-value]


def _elements(base: Spec, dtype: torch.dtype) -> Spec:
    """Spec of `base` as a flat array of `dtype` (``view(dtype)``)."""
    if dtype is base.dtype:
        return base
    return spec((base.size * base.numpy_dtype.itemsize // spec((), dtype).numpy_dtype.itemsize,), dtype)


def _check_bounds(room: Spec, shape: Any, strides: Any, offset: int) -> None:
    """Raises as torch does for a window outside its storage, which holds no bytes that torch could check."""
    if 0 in shape:
        return
    last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if last >= room.size:
        raise RuntimeError(
            f"as_strided: sizes {list(shape)}, strides {list(strides)}, storage offset {offset} need a storage of "
            f"{last + 1} elements of {room.dtype} and are out of bounds for storage of size {room.size}"
        )


def _read_instruction(base: Spec, shape: Any, strides: Any, offset: int, dtype: torch.dtype) -> Instruction:
    target = spec(tuple(shape), dtype)
    _check_bounds(_elements(base, dtype), shape, strides, offset)

    def emit(context: Any, inputs: Any, floats: Any, ints: Any, rng: Any) -> list[Any]:
        return [strided.read_as(inputs[0], target.shape, strides, offset, target.numpy_dtype, ints or None)]

    return _window_instruction("view", emit, target, 1, (base, target, strides, dtype), offset)


_families: weakref.WeakValueDictionary[Any, Family] = weakref.WeakValueDictionary()


def _window_instruction(name: str, emit: Any, out: Spec, inputs: int, key: Any, offset: int) -> Instruction:
    """A read or a write of a window, in the family of the windows that differ in their offset only."""
    base, window, strides, dtype = key
    starts = strided.starts(_elements(base, dtype).size, window.shape, strides, offset)
    if not starts:
        return Instruction(name, emit, (out,), inputs)
    family = _families.get((name, *key))
    if family is None:
        family = _families[name, *key] = Family(lambda: Instruction(name, emit, (out,), inputs, ints=len(starts)))
    return Instruction(name, emit, (out,), inputs, family=family, numbers=starts)


def write(tensor: torch.Tensor, number: int, repeatedly: bool = False) -> None:
    """Gives `tensor` the value `number` (of its shape and dtype), through its storage.

    Args:
        repeatedly: elements of `tensor` may share a memory location, because all values are equal.

    Raises:
        RuntimeError: elements share a memory location and their values may differ.
    """
    buffer = buffer_of(tensor)
    base = buffer.spec
    if tensor.shape == base.shape and tensor.is_contiguous() and tensor.dtype is base.dtype:
        assign(buffer, number)
        return
    key: _ViewKey = (base, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
    instruction = _writes.get(key)
    if instruction is None:
        instruction = _writes[key] = _write_instruction(*key)
    if instruction.name is _REPEATS and not repeatedly:
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location "
            f"(sizes {list(tensor.shape)}, strides {list(tensor.stride())}). Please clone() the tensor before "
            "performing the operation"
        )
    old = buffer.number if buffer.number >= 0 else add_parameter(buffer)
    buffer.number = record(instruction, old, number)


def write_all(tensors: Iterable[torch.Tensor], wholes: Iterable[Buffer | None], number: int) -> None:
    """Writes the values from `number` on to tensors that `operands` has just read; `wholes` is from there."""
    for value, (tensor, whole) in enumerate(zip(tensors, wholes, strict=True), number):
        if whole is not None:
            whole.at = value
        else:
            write(tensor, value)


def fill(tensor: torch.Tensor, number: int) -> None:
    """`write` of equal elements."""
    write(tensor, number, repeatedly=True)


_REPEATS = "write_view_repeatedly"


def _write_instruction(base: Spec, shape: Any, strides: Any, offset: int, dtype: torch.dtype) -> Instruction:
    window = _elements(base, dtype)
    _check_bounds(window, shape, strides, offset)

    def emit(context: Any, inputs: Any, floats: Any, ints: Any, rng: Any) -> list[Any]:
        old, new = inputs
        changed = strided.write(strided.retype(old, window.numpy_dtype), new, shape, strides, offset, ints or None)
        return [strided.retype(changed, base.numpy_dtype).reshape(base.shape)]

    repeats = 0 not in shape and any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True))
    if repeats:
        return Instruction(_REPEATS, emit, (base,), 2)
    return _window_instruction("write_view", emit, base, 2, (base, spec(tuple(shape), dtype), strides, dtype), offset)


def write_out(tensor: torch.Tensor, value_spec: Spec, number: int) -> None:
    """Writes a result into an ``out=`` tensor, resized and converted as torch does."""
    if tuple(tensor.shape) != value_spec.shape:
        resize(tensor, value_spec.shape)
    number, _ = cast(number, value_spec, tensor.dtype)
    write(tensor, number)


_set_geometry: Callable[..., torch.Tensor] = torch.ops.aten.set_.source_Storage_storage_offset.redispatch
_META = torch.DispatchKeySet(torch.DispatchKey.Meta)


def set_geometry(
    tensor: torch.Tensor, store: Any, offset: int | torch.SymInt, shape: Any, strides: Any
) -> torch.Tensor:
    """Points `tensor` at a window of `store`, without torch's bounds check, because device storages have no bytes."""
    return _set_geometry(_META, tensor, store, offset, list(shape), list(strides))


def resize(tensor: torch.Tensor, shape: Any) -> torch.Tensor:
    """`tensor` with another shape, row-major; elements keep their offsets in the storage."""
    buffer = buffer_of(tensor)
    shape = tuple(shape)
    size = spec(shape, tensor.dtype).size
    offset: Any = tensor.storage_offset()
    if size + offset > _elements(buffer.spec, tensor.dtype).size:
        _grow(tensor, buffer, size + offset)
    store = tensor.untyped_storage()
    return set_geometry(tensor, store, offset, shape, shapes.contiguous_strides(shape))


def _grow(tensor: torch.Tensor, buffer: Buffer, size: int) -> None:
    """Gives the storage room for `size` elements of the tensor's dtype, which begins with the present ones."""
    target = spec((size,), tensor.dtype)
    store: Any = tensor.untyped_storage()
    never_written = buffer.array is None and buffer.number < 0 and buffer.unrecorded is None
    if never_written or buffer.spec.size == 0:
        store._xla_amp = Buffer(target)
        return
    old = _elements(buffer.spec, tensor.dtype)
    number = buffer.number if buffer.number >= 0 else add_parameter(buffer)

    instruction = _growths.get((old, target))
    if instruction is None:

        def emit(context: Any, inputs: Any, *_: Any) -> list[Any]:
            flat = strided.retype(inputs[0], old.numpy_dtype).reshape(-1)
            return [jax.numpy.pad(flat, (0, target.size - old.size))]

        instruction = _growths[old, target] = Instruction("resize", emit, (target,), 1)
    grown = Buffer(target, record(instruction, number), generation=trace.generation)
    trace.computed.append(weakref.ref(grown))
    store._xla_amp = grown


def new_tensor(value_spec: Spec, number: int) -> torch.Tensor:
    """A new tensor with the value `number`."""
    tensor = private_api.create_tensor(value_spec.shape, value_spec.dtype)
    store: Any = tensor.untyped_storage()
    store._xla_amp = buffer = Buffer(value_spec, number, None, trace.generation)
    trace.computed.append(weakref.ref(buffer))
    return tensor


def new_view(base: torch.Tensor, dtype: torch.dtype, shape: Any, strides: Any, offset: int) -> torch.Tensor:
    """A new tensor on the storage of `base`; strides and offset count elements of `dtype`."""
    return set_geometry(private_api.create_tensor((0,), dtype), base.untyped_storage(), offset, shape, strides)


def array_of(tensor: torch.Tensor) -> jax.Array:
    """The tensor's value as a concrete array of its shape; flushes the trace if needed."""
    with trace.lock:
        buffer = buffer_of(tensor)
        if not is_whole(tensor):
            number, value_spec = read(tensor)
            buffer = Buffer(value_spec, number, generation=trace.generation)
            trace.computed.append(weakref.ref(buffer))
        return value_of(buffer)


def view_of(value: jax.Array, tensor: torch.Tensor) -> jax.Array:
    """The elements of `tensor` in `value`, any value of its buffer; of a tensor in JAX code, too."""
    offset: Any = tensor.storage_offset()  # an int; torch's stubs also allow a SymInt
    dtype = spec((), tensor.dtype).numpy_dtype
    return materialize(strided.read_as(value, tuple(tensor.shape), tensor.stride(), offset, dtype))


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its buffer, with the shape and the dtype that the buffer has."""
    base = buffer_of(tensor).spec
    return tensor.shape == base.shape and tensor.is_contiguous() and tensor.dtype is base.dtype


def unrecorded(tensor: torch.Tensor) -> Unrecorded | None:
    """The tensor's value if it is still to be recorded and the tensor is all of it."""
    buffer = buffer_of(tensor)
    if buffer.unrecorded is None:
        return None
    with trace.lock:
        waits = buffer.number < 0 and buffer.array is None
    return buffer.unrecorded if waits and is_whole(tensor) else None


def value_of(buffer: Buffer) -> jax.Array:
    """The buffer's value as a concrete array; flushes the trace if needed.  The caller holds the trace's lock."""
    if buffer.array is None and buffer.number < 0:
        add_parameter(buffer)  # memory never written reads as zeros
    if buffer.number >= 0:
        flush()
    if type(buffer.array) is Poisoned:
        raise StepFailedError(buffer.array.reason)
    array: jax.Array = buffer.array
    return array


_SMALL = 1 << 20
"""Bytes up to which a view of a computed tensor is read by copying its whole buffer to the host: that costs less than
an executable for each view."""


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's value as a CPU tensor (counted as one host sync)."""
    with trace.lock:
        buffer = buffer_of(tensor)
        value_spec = buffer.spec
        settled = buffer.number < 0 and isinstance(buffer.array, jax.Array)
        on_host = settled and not is_whole(tensor) and value_spec.size * value_spec.numpy_dtype.itemsize <= _SMALL
        array = buffer.array if on_host else array_of(tensor)
    # Outside of the lock, so that other threads record meanwhile; this reference keeps the array from being donated.
    value = transfer.download(array)
    return window(value, tensor) if on_host else value


def window(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in `value`, its buffer's value on the CPU, as a copy."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)  # a view of no bytes as another dtype is an error in torch
    flat = value.reshape(-1).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).clone()


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` for a `target` on the lazy device and a `source` on any device."""
    if source.device.type != DEVICE_TYPE:
        array = transfer.copy_to_device(source, target.dtype)
        buffer = buffer_of(target)
        whole = source.shape == target.shape and is_whole(target) and not trace.guards
        if whole and (buffer.number < 0 or not any(held is buffer for held in trace.parameters)):
            # An upload of the whole buffer replaces the array; operations recorded before use the old value number.
            release([buffer], lambda old: old)
            buffer.array, buffer.number = array, -1
            return
        source = transfer.wrap(array)
    number, value_spec = read(source)
    number, value_spec = cast(number, value_spec, target.dtype)
    number, value_spec = broadcast(number, value_spec, target.shape)
    write(target, number)
