"""The XLA device as programs ask for it: ``xla_device()``."""

from __future__ import annotations

from typing import Any

import torch

from xla_amp.engines import devices
from xla_amp.errors import DeviceError
from xla_amp.pytorch.autocast import kernels
from xla_amp.torch_common import backward_threads


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The XLA device, started on first use, with autocast ready on it.

    Args:
        n: index of the device; only 0 exists.
        devkind: ``"CPU"``, ``"CUDA"`` (or ``"GPU"``) or ``"TPU"``; raises if the device is of another kind.

    Raises:
        DeviceError: no such device.
    """
    kernels.make_ready()
    device = devices.engine().device()
    backward_threads.make_possible(device)
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
