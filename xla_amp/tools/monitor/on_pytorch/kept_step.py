"""Keep a bad step: its batch, random state, history, and the state before it."""

from __future__ import annotations

import platform
import random
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from xla_amp.backends import base, devices
from xla_amp.backends.trees import tree_map_only


class Before:
    """What a replay needs that is gone after the step: the batch, random states, and a copy of the state if asked for.

    Args:
        batch: what the step computes on.
        device: of the model.
        state: model, optimizer and scaler whose state is copied; None copies none.
    """

    def __init__(
        self,
        batch: tuple[Any, ...],
        device: torch.device,
        state: tuple[torch.nn.Module, torch.optim.Optimizer | None, torch.amp.GradScaler | None] | None,
    ) -> None:
        self.batch = batch
        self.generators = {"cpu": torch.get_rng_state(), "python": random.getstate()}
        if devices.is_xla(device.type):
            self.generators["device"] = devices.engine().get_rng_state()
        elif device.type == "cuda":
            self.generators["device"] = torch.cuda.get_rng_state(device)
        self.state = None if state is None else copied(state_of(*state))

    def write(self, folder: Path) -> None:
        """Writes ``batch.pt``, ``rng.pt`` and ``state.pt``."""
        places: list[str] = []
        torch.save({"batch": on_host(self.batch, places), "places": places}, folder / "batch.pt")
        torch.save(on_host(self.generators), folder / "rng.pt")
        if self.state is not None:
            torch.save(on_host(self.state), folder / "state.pt")


def state_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, scaler: torch.amp.GradScaler | None
) -> dict[str, Any]:
    """The state that a step changes, without reading the device: the tensors themselves."""
    found: dict[str, Any] = {"model": model.state_dict(keep_vars=True)}
    if optimizer is not None:
        found["optimizer"] = torch.optim.Optimizer.state_dict(optimizer)
    if scaler is not None and scaler._scale is not None:
        found["scaler"] = {"scale": scaler._scale, "growth_tracker": scaler._growth_tracker}
    return found


def load_state(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Gives the objects the state of a `state.pt`."""
    model.load_state_dict(state["model"])
    if optimizer is not None and "optimizer" in state:
        optimizer.load_state_dict(copied(state["optimizer"]))
    if scaler is not None and "scaler" in state:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        load_scale(state["scaler"]["scale"], scaler, device, int(state["scaler"]["growth_tracker"]))


def load_scale(
    scale: float | torch.Tensor, scaler: torch.amp.GradScaler, device: torch.device, growth_tracker: int = 0
) -> None:
    """Gives a scaler, which may be new, a loss scale."""
    scaler.load_state_dict({**scaler.state_dict(), "scale": float(scale), "_growth_tracker": growth_tracker})
    scaler.scale(torch.zeros((), device=device))  # makes a new scaler's tensors


@torch.no_grad()
def copied(value: Any) -> Any:
    """`value` with clones of its tensors."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


def process(device: torch.device) -> tuple[int, int]:
    """Rank of this process, and number of processes that train together."""
    if devices.is_xla(device.type):
        processes = base.processes()
        return processes.ordinal(), processes.world_size()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def versions() -> dict[str, str]:
    """Versions of the packages whose change can change a number."""
    found = {name: metadata.version(name) for name in ("xla-amp", "torch", "jax")}
    return {**found, "python": platform.python_version()}


def on_host(value: Any, places: list[str] | None = None) -> Any:
    """`value` as ``torch.load(weights_only=True)`` accepts it; the device type of each tensor goes to `places`.

    Raises:
        TypeError: something in it is no tensor, number, string, list, tuple or dict.
    """
    if isinstance(value, torch.Tensor):
        if places is not None:
            places.append(value.device.type)
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: on_host(each, places) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(on_host(each, places) for each in value)
    if isinstance(value, list):
        return [on_host(each, places) for each in value]
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    raise TypeError(
        f"monitor.step(...): cannot keep a {type(value).__name__}; pass tensors, numbers and strings in lists, tuples "
        "and dicts"
    )
