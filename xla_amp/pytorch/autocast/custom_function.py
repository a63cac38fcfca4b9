"""`custom_fwd` and `custom_bwd`: decorators for `torch.autograd.Function` under autocast; `is_autocast_available`."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from xla_amp.backends import devices
from xla_amp.backends.trees import tree_map
from xla_amp.errors import XlaAmpError
from xla_amp.policy import regions
from xla_amp.pytorch.autocast import casting
from xla_amp.pytorch.autocast.autocast import autocast, has_autocast, reopened

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
        fwd: the static method ``forward(ctx, ...)``, or ``forward(...)`` of a function with ``setup_context``, which
            sees the inputs uncast, as in torch.
        device_type: the device whose regions apply, as `autocast` takes it.
        cast_inputs: inside a region, cast floating tensors on the device (except float64) to this dtype, anywhere in
            the arguments (any pytree; named tuples and ordered dicts keep their types), and run ``forward`` with
            autocast off.  None runs it under the region unchanged.

    Raises:
        DeviceArgumentError: `device_type` is not a device.
    """
    devices.device_type(device_type, "custom_fwd")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    latest = threading.local()

    @functools.wraps(fwd)
    def decorate_fwd(*args: Any, **kwargs: Any) -> Any:
        name = devices.device_type(device_type, "custom_fwd")
        _start_device(name)
        enabled = torch.is_autocast_enabled(name)
        used = enabled and cast_inputs is None
        region = (regions.current(name), torch.get_autocast_dtype(name)) if used else None
        function = _applied(decorate_fwd)
        if function is not None and function.setup_context is not _SETUP_CONTEXT:
            _note_region(function, latest)
        elif function is not None or not isinstance(args[0], torch.Tensor):  # a tensor: called without `apply`
            args[0]._xla_amp_forward = region
        if used or not enabled:
            result = fwd(*args, **kwargs)
        else:

            def cast(value: Any) -> Any:
                tensor = isinstance(value, torch.Tensor)
                eligible = tensor and value.dtype in casting.ELIGIBLE and value.device.type == name
                return value.to(cast_inputs) if eligible else value

            with autocast(name, enabled=False):
                result = fwd(*tree_map(cast, args), **tree_map(cast, kwargs))
        latest.region = region  # after `fwd`, which may apply the same function
        return result

    return decorate_fwd


def _applied(forward: Callable[..., Any]) -> Any:
    """The function with this ``forward`` that is being applied; None where ``forward`` was called directly.

    ``apply`` passes neither the class nor, with ``setup_context``, the ``ctx``; the class is a local of its frame.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _APPLY and frame.f_locals["cls"].forward is forward:
            return frame.f_locals["cls"]
        frame = frame.f_back
    return None


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_SETUP_CONTEXT = torch.autograd.Function.setup_context


def _note_region(function: Any, latest: threading.local) -> None:
    """Makes ``setup_context``, which torch calls right after ``forward``, note the region for `custom_bwd`."""
    if getattr(function.setup_context, "_xla_amp_latest", None) is latest:
        return
    original = getattr(function.setup_context, "_xla_amp_original", function.setup_context)

    @functools.wraps(original)
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        ctx._xla_amp_forward = latest.region
        return original(ctx, inputs, output)

    setup_context._xla_amp_latest = latest  # type: ignore[attr-defined]
    setup_context._xla_amp_original = original  # type: ignore[attr-defined]
    function.setup_context = staticmethod(setup_context)


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
