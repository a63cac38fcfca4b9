"""Device arguments: ``"cuda"``, ``"xla"``, ``"jax:0"``, a `torch.device`, the result of `xla_device()`."""

from __future__ import annotations

from typing import Any

import torch

from xla_amp.engines import base
from xla_amp.errors import DeviceError

XLA = "xla"
"""Alias of the active XLA engine's device type."""


def engine() -> base.Engine:
    """The active XLA engine."""
    return base.select()


class DeviceArgumentError(DeviceError, ValueError):
    """An argument that is not a device; a `ValueError`, as torch raises."""


def device_type(device: Any, caller: str = "autocast") -> str:
    """torch's device type for `device`; ``"xla"`` becomes the active engine's (no device is started).

    Args:
        device: a device type or device as a string, or a `torch.device`.
        caller: the public function that was called, for the error message.

    Raises:
        DeviceArgumentError: neither a string nor a `torch.device`, an index that is not a number or of no device, or
            the device of an XLA engine that is not in use.

    Example:
        >>> device_type("cuda:1"), device_type(torch.device("cpu")), device_type("xla")
        ('cuda', 'cpu', 'jax')
    """
    if isinstance(device, torch.device):
        name, index = device.type, "" if device.index is None else str(device.index)
    elif isinstance(device, str):
        name, colon, index = device.partition(":")
        if not name or (colon and not index.isdigit()):
            raise DeviceArgumentError(
                f"{caller}({device!r}): expected a device type with an optional index, e.g. 'xla', 'cuda' or 'cuda:0'"
            )
    else:
        raise DeviceArgumentError(
            f"{caller}({device!r}): expected a device: a string such as 'xla', 'cuda' or 'cpu', or a torch.device; "
            f"got {type(device).__name__}"
        )
    if name == "cuda" and index and torch.cuda.is_available():
        _check_index(device, int(index), torch.cuda.device_count(), caller)
    if name not in base.DEVICE_TYPES:
        return name
    active = engine().DEVICE_TYPE
    if active == base.LAZY and index:
        _check_index(device, int(index), 1, caller)
    if name not in (XLA, active):
        raise DeviceArgumentError(
            f"{caller}({device!r}): the XLA engine in use has the device {active!r}; pass 'xla', or set "
            f"XLA_AMP_ENGINE={name} before the first use"
        )
    return active


def _check_index(device: Any, index: int, count: int, caller: str) -> None:
    if index >= count:
        legal = "0" if count == 1 else f"0 to {count - 1}"
        raise DeviceArgumentError(f"{caller}({str(device)!r}): no such device; expected the index {legal} or none")


def is_xla(name: str) -> bool:
    """Whether an XLA engine provides the device type."""
    return name in base.DEVICE_TYPES


def read_later(tensor: torch.Tensor) -> base.Read:
    """Starts to read `tensor`, a whole storage; on devices other than XLA's and CUDA's this waits."""
    return engine().read_later(tensor) if is_xla(tensor.device.type) else _Copy(tensor)


class _Copy:
    """A copy that a CUDA device makes behind what it has been given, or that is on the CPU already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event = torch.cuda.Event() if tensor.device.type == "cuda" else None
        self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._event is not None)
        self._value.copy_(tensor, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(tensor.device))

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def value(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._value
