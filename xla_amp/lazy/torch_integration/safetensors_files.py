"""Read files of safetensors onto the lazy device, which is not in safetensors' own list of devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE, require_here


class _Moving:
    """An open file, or a slice of one, whose tensors are moved to `device`."""

    def __init__(self, opened: Any, device: torch.device) -> None:
        self._opened, self._device = opened, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> _Moving:
        self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._opened[index].to(self._device)
        return tensor

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._opened.get_tensor(name).to(self._device)
        return tensor

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._device) for name, tensor in self._opened.get_tensors().items()}

    def get_slice(self, name: str) -> _Moving:
        return _Moving(self._opened.get_slice(name), self._device)


def opening(original: Callable[..., Any]) -> Callable[..., Any]:
    """``safetensors.safe_open`` that also takes the lazy device: ``"jax"``, ``"jax:0"``, a `torch.device`, or 0.

    Raises:
        DeviceError: an index that the device does not have.
    """

    @functools.wraps(original)
    def safe_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        ours = str(device).partition(":")[0] == DEVICE_TYPE or isinstance(device, int)  # torch takes 0 for our device
        if not ours or framework not in ("pt", "torch", "pytorch"):
            return original(filename, framework, device, **options)
        where = torch.device(device)
        require_here(where)
        return _Moving(original(filename, framework, "cpu", **options), where)

    return safe_open
