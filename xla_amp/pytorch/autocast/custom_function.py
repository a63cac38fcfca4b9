"""`custom_fwd` and `custom_bwd`: decorators for `torch.autograd.Function` under autocast; `is_autocast_available`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch.autograd.function import FunctionCtx

from xla_amp.engines import devices
from xla_amp.errors import XlaAmpError
from xla_amp.policy import regions
from xla_amp.pytorch.autocast import casting
from xla_amp.pytorch.autocast.autocast import autocast, has_autocast, reopened
from xla_amp.torch_common.trees import tree_map

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_autocast_available(device_type: str | torch.device) -> bool:
    """Whether `autocast` can be used on a device: ``"xla"``, any string that torch takes, or a `torch.device`.

    Raises:
        DeviceError: no such device exists.
    """
    name = devices.device_type(device_type, "is_autocast_available")
    if not devices.is_xla(name):
        return has_autocast(name)
    try:
        devices.engine().device()
    except XlaAmpError:
        return False
    return True


@overload
def custom_fwd(
    fwd: _Function, *, device_type: str | torch.device, cast_inputs: torch.dtype | None = None
) -> _Function: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str | torch.device, cast_inputs: torch.dtype | None = None
) -> Callable[[_Function], _Function]: ...
def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, device_type: str | torch.device, cast_inputs: torch.dtype | None = None
) -> Callable[..., Any]:
    """Decorator for the ``forward`` of a `torch.autograd.Function` that runs under `autocast`.

    Args:
        fwd: the static method ``forward(ctx, ...)``.
        device_type: the device whose regions apply, as `autocast` takes it.
        cast_inputs: inside a region, cast floating tensors on the device (except float64) to this dtype, anywhere in
            the arguments (any pytree; named tuples and ordered dicts keep their types), and run ``forward`` with
            autocast off.  None runs it under the region unchanged.

    Raises:
        DeviceArgumentError: `device_type` is not a device.
        TypeError: from ``apply``: `fwd` has no ``ctx``, as in a function with ``setup_context``.
    """
    devices.device_type(device_type, "custom_fwd")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def decorate_fwd(*args: Any, **kwargs: Any) -> Any:
        name = devices.device_type(device_type, "custom_fwd")
        _start_device(name)
        enabled = torch.is_autocast_enabled(name)
        used = enabled and cast_inputs is None
        region = (regions.current(name), torch.get_autocast_dtype(name)) if used else None
        if not args or not isinstance(args[0], FunctionCtx):
            raise TypeError(
                f"{fwd.__qualname__}: custom_fwd expects forward(ctx, ...), got a first argument of type "
                f"{type(args[0]).__name__ if args else None}; in place of setup_context save the tensors in forward"
            )
        args[0]._xla_amp_forward = region  # type: ignore[attr-defined]
        if used or not enabled:
            return fwd(*args, **kwargs)

        def cast(value: Any) -> Any:
            tensor = isinstance(value, torch.Tensor)
            eligible = tensor and value.dtype in casting.ELIGIBLE and value.device.type == name
            return value.to(cast_inputs) if eligible else value

        with autocast(name, enabled=False):
            return fwd(*tree_map(cast, args), **tree_map(cast, kwargs))

    return decorate_fwd


@overload
def custom_bwd(bwd: _Function, *, device_type: str | torch.device) -> _Function: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str | torch.device) -> Callable[[_Function], _Function]: ...
def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | torch.device) -> Callable[..., Any]:
    """Decorator for the ``backward`` of a `torch.autograd.Function`: it runs in the dtypes of ``forward``.

    Raises:
        DeviceArgumentError: `device_type` is not a device.
    """
    devices.device_type(device_type, "custom_bwd")
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorate_bwd(*args: Any, **kwargs: Any) -> Any:
        name = devices.device_type(device_type, "custom_bwd")
        _start_device(name)
        if not hasattr(args[0], "_xla_amp_forward"):
            raise XlaAmpError(f"{bwd.__qualname__}: forward was not decorated with xla_amp.custom_fwd")
        forward = args[0]._xla_amp_forward
        with autocast(name, enabled=False) if forward is None else reopened(forward[0], name, forward[1]):
            return bwd(*args, **kwargs)

    return decorate_bwd


def _start_device(name: str) -> None:
    """Starts an XLA device: torch has autocast state only for registered devices."""
    if devices.is_xla(name) and not devices.engine().is_started():
        devices.engine().device()
