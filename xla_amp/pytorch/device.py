"""The XLA device as programs ask for it: ``xla_device()``."""

from __future__ import annotations

import threading
from typing import Any

import torch

from xla_amp.backends import devices
from xla_amp.errors import DeviceError
from xla_amp.pytorch.autocast import xla_dispatch


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The XLA device, started on first use, with autocast ready on it.

    Args:
        n: index of the device; only 0 exists.
        devkind: ``"CPU"``, ``"CUDA"`` (or ``"GPU"``) or ``"TPU"``; raises if the device is of another kind.

    Raises:
        DeviceError: no such device.
    """
    xla_dispatch.make_ready()
    device = devices.engine().device()
    _make_backward_possible(device)
    if n not in (None, device.index or 0):
        number = device.index or 0
        raise DeviceError(f"xla_device(n={n!r}): this process has one XLA device, number {number}; leave n out")
    if devkind is not None and kind(devkind) != xla_device_hw(device):
        raise DeviceError(
            f"xla_device(devkind={devkind!r}): the device is of kind {xla_device_hw(device)!r}; set XLA_AMP_PLATFORM "
            "to cpu, gpu or tpu before the first use to choose another"
        )
    return device


def xla_device_hw(device: Any) -> str:
    """Kind of hardware under a device: ``"CPU"``, ``"CUDA"`` or ``"TPU"``, torch_xla's names."""
    name = devices.device_type(device, "xla_device_hw")
    return kind(devices.engine().platform() if devices.is_xla(name) else name)


def kind(name: str) -> str:
    """torch_xla's name of a platform or of a device type: ``"CPU"``, ``"CUDA"`` or ``"TPU"``."""
    upper = name.upper()
    return "CUDA" if upper in ("GPU", "ROCM") else upper


# ---- backward passes on a device that was registered after the process's first one -----------------------------------
# At the first backward pass autograd starts one thread per device that is registered; nodes of a device that is
# registered later fail an internal check.  With multithreading disabled, autograd uses the calling thread.

_lock = threading.Lock()
_has_thread: bool | None = None


def _make_backward_possible(device: torch.device) -> None:
    """Disables autograd's threads for the calling thread if autograd has no thread for `device`."""
    global _has_thread
    with _lock:
        if _has_thread is None:
            _has_thread = _probe(device)
    if not _has_thread:
        torch.autograd.set_multithreading_enabled(False)


class _Nothing(torch.autograd.Function):
    """A node whose backward pass computes nothing, so that the probe records nothing on the device."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> None:
        return None


class _Leave(torch.autograd.Function):
    """A number on the CPU, from which `backward` starts: a gradient that is given imports sympy, for 0.3 s."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        context.device = tensor.device
        return torch.zeros(())

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, device=context.device)


def _probe(device: torch.device) -> bool:
    try:
        with torch.enable_grad():
            probe = torch.empty(0, device=device, requires_grad=True)
            result: torch.Tensor = _Leave.apply(_Nothing.apply(probe))  # type: ignore[no-untyped-call, unused-ignore]
        result.backward()
    except RuntimeError as error:
        if "device_ready_queues_" in str(error):
            return False
        raise
    return True
