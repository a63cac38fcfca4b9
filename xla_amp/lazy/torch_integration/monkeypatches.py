"""The few places in torch that the lazy device cannot do without, each with its reason.

They go in when the device is first used, once, and change nothing for tensors of other devices.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from xla_amp.errors import DeviceError
from xla_amp.lazy.tensors import tensor_io, transfer
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import accelerator


def mark_storages() -> None:
    """A class default, so that asking any storage for its buffer is a plain attribute read.

    Reason: the value of a lazy tensor hangs on its storage, and kernels ask for it several times per operation.
    """
    torch.UntypedStorage._xla_amp = None  # type: ignore[attr-defined]


def install() -> None:
    """Puts all hooks in."""
    _copy_without_bytes()
    _make_no_storage_of_bytes()
    _send_no_storage()
    _show_no_bytes()
    _load_checkpoints()
    _print_through_the_host()
    _pin_nothing()
    _keep_parameters_when_moved()
    accelerator.install()


def _copy_without_bytes() -> None:
    """Reason: copy.deepcopy and torch.save would copy the storage's bytes, of which there are none (a crash)."""
    has_storage = torch._C._has_storage

    def has_bytes(tensor: torch.Tensor) -> bool:
        return tensor.device.type != DEVICE_TYPE and has_storage(tensor)

    torch._C._has_storage = has_bytes


def _make_no_storage_of_bytes() -> None:
    """Reason: UntypedStorage(n, device="jax"), and with it storage.clone(), would ask for an allocator (a crash)."""
    original = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == DEVICE_TYPE:
            raise DeviceError(
                f"cannot make or copy a storage on {device}: storages of the device {DEVICE_TYPE!r} hold no bytes. "
                "Work with tensors: tensor.clone() copies, tensor.cpu().untyped_storage() has the bytes"
            )
        return original(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign,assignment]


def _send_no_storage() -> None:
    """Reason: multiprocessing shares a storage's bytes; the receiver would read memory that is not ours."""
    from multiprocessing.reduction import ForkingPickler

    from torch.multiprocessing import reductions

    original = reductions.reduce_tensor

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        if tensor.device.type == DEVICE_TYPE:
            raise DeviceError(
                f"cannot send a tensor on {tensor.device} to another process (shape {list(tensor.shape)}): "
                "send tensor.cpu() and move it to the device on the other side"
            )
        return original(tensor)

    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, reduce_tensor)


def _show_no_bytes() -> None:
    """Reason: DLPack capsules and storages read as lists would show memory that is not there, as zeros or nothing."""

    def refuse(what: str) -> DeviceError:
        return DeviceError(
            f"cannot {what}: tensors of the device {DEVICE_TYPE!r} hold no bytes that others could read. Use "
            "tensor.cpu(), which has them"
        )

    def exported(original: Any) -> Any:
        @functools.wraps(original)
        def export(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == DEVICE_TYPE:
                raise refuse(f"hand a tensor on {tensor.device} over through DLPack (shape {list(tensor.shape)})")
            return original(tensor, *args, **kwargs)

        return export

    for owner, name in (
        (torch.Tensor, "__dlpack__"),
        (torch.Tensor, "__dlpack_device__"),
        (torch, "to_dlpack"),
        (torch.utils.dlpack, "to_dlpack"),
    ):
        if hasattr(owner, name):
            setattr(owner, name, exported(getattr(owner, name)))

    def read(original: Any) -> Any:
        @functools.wraps(original)
        def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.device.type == DEVICE_TYPE:
                raise refuse("read a storage as a list or as CPU bytes")
            return original(self, *args, **kwargs)

        return reading

    for kind in (torch.UntypedStorage, torch.storage.TypedStorage):
        for name in ("tolist", "cpu"):
            setattr(kind, name, read(getattr(kind, name)))


def _load_checkpoints() -> None:
    """Reason: torch.load(map_location="jax") would move a storage byte by byte to a device without bytes (a crash)."""

    def location(store: Any) -> str | None:
        return DEVICE_TYPE if store.device.type == DEVICE_TYPE else None

    def restore(store: Any, where: str) -> Any:
        if where.split(":")[0] != DEVICE_TYPE:
            return None
        raw = torch.empty(0, dtype=torch.uint8).set_(store if hasattr(store, "nbytes") else store.untyped())
        tensor = transfer.to_device(raw)
        loaded = tensor.untyped_storage()
        loaded._xla_amp.raw = True
        return loaded

    address = torch.UntypedStorage.data_ptr

    def data_ptr(self: Any) -> int:
        # torch.load remembers a storage, for the next tensor that shares it, only if its address is not zero.
        buffer = self._xla_amp
        return address(self) or int(buffer is not None and buffer.raw)

    torch.UntypedStorage.data_ptr = data_ptr  # type: ignore[method-assign]
    torch.serialization.register_package(5, location, restore)


def _print_through_the_host() -> None:
    """Reason: torch prints a tensor through about fourteen small reads, each of which would flush the trace."""
    from torch import _tensor_str

    original = _tensor_str._str_intern

    def through_the_host(inp: Any, *, tensor_contents: Any = None) -> str:
        plain = type(inp) in tensor_io.PLAIN
        if tensor_contents is not None or not plain or inp.device.type != DEVICE_TYPE:
            return original(inp, tensor_contents=tensor_contents)
        text = original(inp.detach().cpu() if inp.is_sparse else tensor_io.to_host(inp)).removesuffix(")")
        text += f", device='{inp.device}'"
        if inp.grad_fn is not None:
            text += f", grad_fn=<{type(inp.grad_fn).__name__}>"
        elif inp.requires_grad:
            text += ", requires_grad=True"
        return f"{text})"

    _tensor_str._str_intern = through_the_host


def _pin_nothing() -> None:
    """Reason: DataLoader(pin_memory=True) asks the accelerator for a pinned allocator; a Python device has none."""
    original = torch.Tensor.pin_memory

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return self if device is None or str(device).startswith(DEVICE_TYPE) else original(self, device)

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]


_crossing = threading.local()


def _keep_parameters_when_moved() -> None:
    """Reason: a CPU parameter cannot become a lazy one in place, so Module.to would make a new Parameter.

    Tied weights would part and an optimizer built before ``.to`` would keep the CPU ones.  torch can swap the contents
    of the two instead, which keeps the objects; its global switch for that
    (``torch.__future__.set_swap_module_params_on_conversion``) would also change modules of every other device, so the
    swap is asked for here only for a parameter that enters or leaves the lazy device.
    """
    from torch.nn.modules import module
    from torch.nn.parameter import is_lazy

    apply, wrapped = module.Module._apply, module.is_traceable_wrapper_subclass  # type: ignore[attr-defined]

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        def noting(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            _crossing.now = (tensor.device.type == DEVICE_TYPE) != (result.device.type == DEVICE_TYPE)
            return result

        noting.notes = True  # type: ignore[attr-defined]
        # A swap takes the class along, but a parameter of a lazy module must stay uninitialized.
        lazy = {name: type(p) for name, p in self._parameters.items() if p is not None and is_lazy(p)}
        try:
            return apply(self, fn if hasattr(fn, "notes") else noting, recurse)
        finally:
            _crossing.now = False
            for name, kind in lazy.items():
                self._parameters[name].__class__ = kind

    def should_swap(tensor: Any) -> bool:
        return getattr(_crossing, "now", False) or wrapped(tensor)

    module.Module._apply = _apply  # type: ignore[method-assign]
    module.is_traceable_wrapper_subclass = should_swap  # type: ignore[attr-defined]
