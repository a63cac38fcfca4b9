"""Storages of the lazy device as torch's Python code sees them: an address, a size in bytes, copies.

Libraries that write checkpoints recognize tied weights by the address and size of their storages.  C++ code sees a
storage of zero bytes at address zero, so torch cannot read through the address, and it costs no memory.
`torch_integration.monkeypatches` installs these functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.storage import UntypedStorage

from xla_amp.errors import DeviceError
from xla_amp.lazy.graph.trace import Buffer, spec, trace
from xla_amp.lazy.tensors import tensor_io, transfer
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

_ALIGNMENT = 512
_lock = threading.Lock()
_next_address = 1 << 62 | 1 << 55
"""No process has memory here: the address is not canonical on x86-64 and belongs to the kernel on ARM64.  Addresses
are given out once, so a checkpoint never takes a new tensor for one that was freed."""


def _address(buffer: Buffer) -> int:
    """The buffer's address, the same at every call."""
    global _next_address
    with _lock:
        if buffer.address == 0:
            buffer.address = _next_address
            _next_address += (_size(buffer) // _ALIGNMENT + 1) * _ALIGNMENT
        return buffer.address


def _size(buffer: Buffer) -> int:
    return buffer.spec.size * buffer.spec.dtype.itemsize


def new(size: int) -> UntypedStorage:
    """A storage on the device for `size` bytes; the first tensor that is set on it gives it a dtype."""
    return _of(Buffer(spec((size,), torch.uint8)), torch.from_numpy(np.zeros(size, np.uint8)))


def from_host(source: UntypedStorage) -> UntypedStorage:
    """A storage on the device with the bytes of a CPU storage, read and uploaded when the first tensor is set on it."""
    return _of(Buffer(spec((source.nbytes(),), torch.uint8)), _as_bytes(source))


def _of(buffer: Buffer, raw: torch.Tensor | None = None) -> UntypedStorage:
    buffer.raw = raw
    return transfer.tensor_over(buffer).untyped_storage()


def _as_bytes(storage: UntypedStorage) -> torch.Tensor:
    """A uint8 tensor on all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(storage: Any) -> torch.Tensor:
    """A copy of the storage's bytes as uint8[n] on the CPU; runs the trace if needed, compiles nothing else."""
    buffer: Buffer | None = storage._xla_amp
    if buffer is None or not buffer.spec.size:
        return torch.empty(0, dtype=torch.uint8)
    if buffer.raw is not None:
        return buffer.raw.clone()
    with trace.lock:
        array = tensor_io.value_of(buffer)
    return transfer.download(array).reshape(-1).view(torch.uint8)


# -- what replaces methods of torch.UntypedStorage; `original` is the method of the same name --------------------------


def data_ptr(original: Callable[..., int], self: Any) -> int:
    """An address that no other storage has or had, and that holds no memory."""
    return _address(self._xla_amp) if self._xla_amp is not None else original(self)


def nbytes(original: Callable[..., int], self: Any) -> int:
    """Size in bytes of the value."""
    return _size(self._xla_amp) if self._xla_amp is not None else original(self)


def clone(original: Callable[..., Any], self: Any) -> UntypedStorage:
    """A copy on the device; copies nothing now, because values never change."""
    buffer: Buffer = self._xla_amp
    if buffer.raw is not None:
        return _of(Buffer(buffer.spec), buffer.raw.clone())
    with trace.lock:
        return transfer.tensor_over(buffer).clone().untyped_storage()


def copy_(original: Callable[..., Any], self: Any, source: Any, non_blocking: bool | None = None) -> Any:
    """Overwrites a storage with the bytes of another, of the same size; one of them is on the device."""
    if self._xla_amp is None and source.device.type != DEVICE_TYPE:
        return original(self, source, non_blocking)
    if isinstance(source, torch.storage.TypedStorage):
        source = source.untyped()
    if self.nbytes() != source.nbytes():
        raise RuntimeError(
            f"storage.copy_: expected a source of {self.nbytes()} bytes, got {source.nbytes()} bytes on {source.device}"
        )
    values = _host_bytes(source) if source._xla_amp is not None else _as_bytes(source.cpu())
    if self.device.type != DEVICE_TYPE:
        _as_bytes(self).copy_(values)
    elif self._xla_amp.raw is not None:
        self._xla_amp.raw = values.clone()
    else:
        buffer: Buffer = self._xla_amp
        transfer.tensor_over(buffer).copy_(values.view(buffer.spec.dtype).view(buffer.spec.shape))
    return self


def getitem(original: Callable[..., Any], self: Any, index: Any) -> Any:
    """Reads a byte through the host."""
    if isinstance(index, slice):
        raise DeviceError(
            f"storage[{index.start}:{index.stop}] of a storage on {self.device} would share its memory, which cannot "
            "be addressed. Use storage.cpu(), a copy"
        )
    return original(self.cpu(), index)


def write_file(original: Callable[..., None], self: Any, *args: Any) -> None:
    """Writes the bytes to a file (torch's old checkpoint format)."""
    original(self.cpu(), *args)


def on_host(original: Callable[..., None], self: Any, *args: Any) -> Any:
    """Swaps bytes, or reads them from a file (torch's old checkpoint format)."""
    host = self.cpu()
    original(host, *args)
    return self.copy_(host)


def resize_(original: Callable[..., Any], self: Any, size: int) -> Any:
    """Raises: an array has the size that it was made with."""
    raise DeviceError(
        f"cannot resize a storage on {self.device} from {self.nbytes()} to {size} bytes: resize the tensor "
        "(tensor.resize_), or drop every reference to it to free its memory. FullyShardedDataParallel frees memory in "
        "this way: use xla_amp.shard(model, mesh, 'fsdp') in its place"
    )


METHODS: dict[str, Callable[..., Any]] = {
    "__getitem__": getitem,
    "__len__": nbytes,
    "_byteswap": on_host,
    "_set_from_file": on_host,
    "_write_file": write_file,
    "clone": clone,
    "data_ptr": data_ptr,
    "nbytes": nbytes,
    "resize_": resize_,
}
"""Method of `torch.UntypedStorage` -> what it does for a storage of the lazy device (see also `copy_`)."""


def tensor_address(original: Callable[[torch.Tensor], int], self: torch.Tensor) -> int:
    """``tensor.data_ptr()``: the storage's address and the tensor's offset in it, in bytes; 0 for an empty tensor."""
    offset = original(self)  # from address zero; raises for a tensor without a storage
    if self.device.type != DEVICE_TYPE or not self.numel():
        return offset
    return _address(tensor_io.buffer_of(self)) + offset
