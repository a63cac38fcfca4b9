"""Read tensors without waiting, on any device."""

from __future__ import annotations

import torch

from xla_amp.backends import base, devices


class _Copy:
    """A copy that a CUDA device makes behind what it has been given, or that is on the CPU already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._value = tensor.detach().to("cpu", copy=True)

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def value(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._value


def read_later(tensor: torch.Tensor, overwritten: bool = False) -> base.Read:
    """Starts to read `tensor`; `overwritten` tells that later steps write to it in place.

    On devices other than XLA's and CUDA's this waits.
    """
    tensor = tensor.detach()
    if devices.is_xla(tensor.device.type):
        return devices.engine().read_later(tensor, overwritten)
    return _Copy(tensor)
