"""Which device a user means: ``"cuda"``, ``"xla"``, ``"jax:0"``, a `torch.device`, what `xla_device()` returned."""

from __future__ import annotations

from typing import Any

import torch

from xla_amp.backends import base
from xla_amp.errors import DeviceError

XLA = "xla"
"""Stands for the active XLA engine's device, whatever torch calls it."""

ENGINES = ("jax", "xla")
"""Device types, as torch names them, that an XLA engine provides."""


def engine() -> Any:
    """The active XLA engine (`xla_amp.backends.base.Engine`)."""
    return base.select()


class DeviceArgumentError(DeviceError, ValueError):
    """Something that is no device; a `ValueError`, as torch raises."""


def device_type(device: Any, caller: str = "autocast") -> str:
    """torch's device type for `device`; ``"xla"`` becomes the active engine's (no device is started).

    Args:
        device: a device type or device as a string, or a `torch.device`.
        caller: the public function that was called, for the error message.

    Raises:
        DeviceArgumentError: neither a string nor a `torch.device`, an index that is no number, or the device of an XLA
            engine that is not in use.

    Example:
        >>> device_type("cuda:1"), device_type(torch.device("cpu")), device_type("xla")
        ('cuda', 'cpu', 'jax')
    """
    if isinstance(device, torch.device):
        name = device.type
    elif isinstance(device, str):
        name, colon, index = device.partition(":")
        if not name or (colon and not index.isdigit()):
            raise DeviceArgumentError(
                f"{caller}({device!r}): expected a device type and perhaps an index, e.g. 'xla', 'cuda' or 'cuda:0'"
            )
    else:
        raise DeviceArgumentError(
            f"{caller}({device!r}): expected a device: a string such as 'xla', 'cuda' or 'cpu', or a torch.device; "
            f"got {type(device).__name__}"
        )
    if name not in ENGINES:
        return name
    active = engine().DEVICE_TYPE
    if name not in (XLA, active):
        raise DeviceArgumentError(
            f"{caller}({device!r}): the XLA engine in use has the device {active!r}; pass 'xla', or set "
            f"XLA_AMP_ENGINE={name} before the first use"
        )
    return active


def is_xla(name: str) -> bool:
    """Whether the device type is one that an XLA engine provides."""
    return name in ENGINES
