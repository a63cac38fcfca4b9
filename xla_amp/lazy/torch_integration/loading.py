"""What is loaded: step counts of other libraries and on the CPU go to the host, files of safetensors to the device.

``torch.load(map_location="jax")`` moves them to the device with everything else, and each later step would wait for
the device once for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE, require_here
from xla_amp.training import initial_state

_COUNT = "step"
"""The scalar that optimizers keep on the host; torch.optim's classes count on the device where the parameter is."""


def load_state_dict(original: Callable[..., None], self: torch.optim.Optimizer, state_dict: Any) -> None:
    """`torch.optim.Optimizer.load_state_dict`; scalars that a fresh optimizer has on the host go there.

    Waits for the device once, whatever the number of parameters.
    """
    before = [dict(group) for group in self.param_groups]
    original(self, state_dict)
    _to_host([*_counts(self), *_options(self, before)])


def _counts(optimizer: torch.optim.Optimizer) -> Iterator[tuple[MutableMapping[str, Any], str]]:
    counts_there = initial_state.is_torchs(initial_state.torchs_class(optimizer))
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if _COUNT in state and not (counts_there and parameter.device.type == DEVICE_TYPE):
                yield state, _COUNT


def _options(
    optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]
) -> Iterator[tuple[MutableMapping[str, Any], str]]:
    """Hyperparameters that were tensors on the host before, a learning rate for instance."""
    for old, new in zip(before, optimizer.param_groups, strict=True):
        for name, value in old.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                yield new, name


def _to_host(places: list[tuple[MutableMapping[str, Any], str]]) -> None:
    tensors = ((owner, name) for owner, name in places if isinstance(owner.get(name), torch.Tensor))
    found = [
        (each, name) for each, name in tensors if each[name].device.type == DEVICE_TYPE and each[name].numel() == 1
    ]
    for dtype in {owner[name].dtype for owner, name in found}:
        same = [(owner, name) for owner, name in found if owner[name].dtype == dtype]
        values = torch.stack([owner[name].detach().reshape(()) for owner, name in same]).cpu()
        for (owner, name), value in zip(same, values, strict=True):
            owner[name] = value.clone()


# ---- files of safetensors --------------------------------------------------------------------------------------------


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


def safe_open(original: Callable[..., Any], filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
    """``safetensors.safe_open`` that also takes the lazy device: ``"jax"``, ``"jax:0"``, a `torch.device`, or 0.

    Raises:
        DeviceError: an index that the device does not have.
    """
    ours = str(device).partition(":")[0] == DEVICE_TYPE or isinstance(device, int)  # torch takes 0 for our device
    if not ours or framework not in ("pt", "torch", "pytorch"):
        return original(filename, framework, device, **options)
    where = torch.device(device)
    require_here(where)
    return _Moving(original(filename, framework, "cpu", **options), where)
