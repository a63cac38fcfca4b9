"""Kernels for memory, views, copies and reads of tensors: operations without a lowering.

Each is a kernel for one ATen overload; the dispatcher calls it with the arguments of the schema.
"""

from __future__ import annotations

import math
from _thread import get_ident
from typing import Any

import torch

from xla_amp.common import interrupts
from xla_amp.errors import DeviceError
from xla_amp.lazy.base import forks, private_api, shapes
from xla_amp.lazy.graph.trace import Buffer, add_parameter, cast, conversions, record, spec, trace
from xla_amp.lazy.ops.operators import KernelTable, on_key
from xla_amp.lazy.steps.loops import flush_if_full, look
from xla_amp.lazy.tensors import host_values, tensor_io, transfer
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

aten = torch.ops.aten
_lock = trace.lock
KERNELS = KernelTable()
"""ATen name -> kernel."""

_as_strided = on_key("as_strided", "Meta")


# -- memory -----------------------------------------------------------------------------------------------------------


@KERNELS.implements("empty.memory_format")
def _empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    tensor_io.require_here(device)
    forks.check()
    value_spec = spec(tuple(size), dtype or torch.get_default_dtype())
    tensor = private_api.create_tensor(value_spec.shape, value_spec.dtype)
    storage: Any = tensor.untyped_storage()
    storage._xla_amp = Buffer(value_spec)
    return tensor


@KERNELS.implements("_efficientzerotensor")
def _efficient_zeros(size: Any, **options: Any) -> torch.Tensor:
    zeros: torch.Tensor = aten.full(size, 0, **options)
    return zeros  # XLA folds zeros, so the device needs no ZeroTensor


@KERNELS.implements("empty_strided")
def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    # New tensors are row-major whatever was asked, as in torch_xla: XLA chooses physical layouts.
    return _empty(size, dtype=dtype, device=device)


@KERNELS.implements("resize_")
def _resize(self: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    with trace.lock:
        return self if tuple(self.shape) == tuple(size) else tensor_io.resize(self, size)


@KERNELS.implements("set_.source_Storage_storage_offset")
def _set_storage(self: torch.Tensor, source: Any, storage_offset: int, size: Any, stride: Any = ()) -> torch.Tensor:
    stride = stride or shapes.contiguous_strides(size)
    buffer = source._xla_amp
    if buffer is not None and buffer.raw is not None:
        # Bytes of a checkpoint: torch.load sets each tensor on its storage, and only the tensor has the dtype.
        values, buffer.raw = buffer.raw, None
        if values.numel() % self.dtype.itemsize == 0:
            values = values.view(self.dtype)
        whole = storage_offset == 0 and tuple(stride) == tuple(shapes.contiguous_strides(size))
        if whole and math.prod(size) == values.numel():
            values = values.view(size)
        buffer.store(transfer.upload(values))
        buffer.spec = spec(tuple(values.shape), values.dtype)
    return tensor_io.set_geometry(self, source, storage_offset, size, stride)


@KERNELS.implements("set_.source_Storage")
def _set_whole_storage(self: torch.Tensor, source: Any) -> torch.Tensor:
    return _set_storage(self, source, 0, [source.nbytes() // self.dtype.itemsize], [1])


@KERNELS.implements("set_.source_Tensor")
def _set_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    store = source.untyped_storage()
    return tensor_io.set_geometry(self, store, source.storage_offset(), source.shape, source.stride())


@KERNELS.implements("set_")
def _set_empty(self: torch.Tensor) -> torch.Tensor:
    return _set_tensor(self, _empty((0,), dtype=self.dtype))


# -- views ------------------------------------------------------------------------------------------------------------


# torch's meta kernels create the alias without reading or bounds-checking the storage, which has no bytes here.
KERNELS.update({name: on_key(name, "Meta") for name in ("unfold", "view", "view_as_complex", "view_as_real")})
KERNELS["as_strided"] = _as_strided


@KERNELS.implements("_reshape_alias")
def _reshape_alias(self: torch.Tensor, size: Any, stride: Any) -> torch.Tensor:
    view: torch.Tensor = _as_strided(self, size, stride, self.storage_offset())
    return view


@KERNELS.implements("_conj")
def _conj(self: torch.Tensor) -> torch.Tensor:
    # Lazy conjugation would be a bit that matrix products and copies must check; XLA fuses the operation anyway.
    result: torch.Tensor = aten._conj_physical(self)
    return result


@KERNELS.implements("_neg_view")
def _neg_view(self: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = aten.neg(self)
    return result


@KERNELS.implements("as_strided_")
def _as_strided_in_place(self: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    offset = self.storage_offset() if storage_offset is None else storage_offset
    return tensor_io.set_geometry(self, self.untyped_storage(), offset, size, stride)


# -- copies -----------------------------------------------------------------------------------------------------------


@KERNELS.implements("clone")
def _clone(self: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
    with trace.lock:
        flush_if_full(self)
        number, value_spec = tensor_io.read(self)
        return tensor_io.new_tensor(value_spec, number)  # values in the trace never change: sharing one is copying it


@KERNELS.implements("_to_copy")
def _to_copy(
    self: torch.Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    # 40 % of the operations of a mixed-precision step are casts of whole tensors, so these have a fast path.
    here = device is None or (device.type == DEVICE_TYPE and not device.index)
    if here and type(self) in tensor_io.PLAIN and (buffer := self.untyped_storage()._xla_amp) is not None:  # type: ignore[attr-defined]
        value_spec = buffer.spec
        found = conversions.get((value_spec, dtype))
        if (
            found is not None
            and buffer.unrecorded is None
            and self.shape == value_spec.shape
            and self.is_contiguous()
            and self.dtype is value_spec.dtype
        ):
            _lock.acquire()  # as generated kernels do
            try:
                if get_ident() != _lock.thread:
                    interrupts.changes_hands()
                if trace.count > trace.limit:
                    look(self)
                number = buffer.at if buffer.generation is trace.generation else add_parameter(buffer)
                return tensor_io.new_tensor(found.outs[0], record(found, number))  # type: ignore[arg-type]
            finally:
                _lock.release()
                if interrupts.waiting:
                    interrupts.deliver()
    return _copied(self, dtype or self.dtype, device)


def _copied(self: torch.Tensor, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if device is not None and device.type != DEVICE_TYPE:
        if device.type == "meta":
            return torch.empty(self.shape, dtype=dtype, device="meta")
        return _on_host(self).to(device, dtype)
    tensor_io.require_here(device)
    if self.device.type != DEVICE_TYPE:
        return transfer.wrap(transfer.copy_to_device(self, dtype))
    if (rows := tensor_io.unrecorded(self)) is not None:
        return rows.converted(dtype)
    with trace.lock:
        flush_if_full(self)
        number, value_spec = tensor_io.read(self)
        number, value_spec = cast(number, value_spec, dtype)
        return tensor_io.new_tensor(value_spec, number)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; without a wait if it follows from uploaded integers and booleans."""
    wanted = not tensor.is_floating_point() and not tensor.is_complex()
    found = host_values.value(tensor) if wanted else None
    return tensor_io.to_host(tensor) if found is None else found


@KERNELS.implements("copy_")
def _copy_(self: torch.Tensor, src: Any, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(src, torch.Tensor):  # ``copy_(2.0)``: torch gives kernels in Python the number
        number = src.real if isinstance(src, complex) and not self.is_complex() else src
        src = torch.tensor(number).to(self.dtype)
    if self.device.type != DEVICE_TYPE:
        return self.copy_(_on_host(src))
    with trace.lock:
        flush_if_full(self)
        tensor_io.copy(self, src)
    return self


@KERNELS.implements("_copy_from")
def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy_(dst, self)


@KERNELS.implements("_copy_from_and_resize")
def _copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    if dst.shape != self.shape:
        dst.resize_(self.shape)
    return _copy_(dst, self)


# -- compositions of other operations ---------------------------------------------------------------------------------


@KERNELS.implements("_weight_norm_interface_backward")
def _weight_norm_backward(
    grad_w: torch.Tensor, saved_v: torch.Tensor, saved_g: torch.Tensor, saved_norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    gradients: tuple[torch.Tensor, torch.Tensor] = aten._weight_norm_differentiable_backward(
        grad_w, saved_v, saved_g, saved_norms, dim
    )
    return gradients


# -- reads -------------------------------------------------------------------------------------------------------------


@KERNELS.implements("_local_scalar_dense")
def _item(self: torch.Tensor) -> Any:
    found = host_values.value(self)
    return (tensor_io.to_host(self) if found is None else found).item()


@KERNELS.implements("equal")
def _equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    if self.device != other.device:
        raise DeviceError(f"torch.equal expects both tensors on one device, got {self.device} and {other.device}")
    return self.shape == other.shape and bool((self == other).all().item())


@KERNELS.implements("is_pinned")
def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return False


@KERNELS.implements("record_stream")
def _record_stream(self: torch.Tensor, s: Any) -> None:
    return None
