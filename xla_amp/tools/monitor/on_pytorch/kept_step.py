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
from xla_amp.tools.monitor import bad_step
from xla_amp.tools.monitor.history import History, StepRecord
from xla_amp.tools.monitor.run import Run


class Before:
    """What a replay needs that is gone after the step: random states, and copies of the state if asked for."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        device: torch.device,
        save_state: bool,
    ) -> None:
        self.device = device
        self.generators = {"cpu": torch.get_rng_state(), "python": random.getstate()}
        if devices.is_xla(device.type):
            self.generators["device"] = devices.engine().get_rng_state()
        elif device.type == "cuda":
            self.generators["device"] = torch.cuda.get_rng_state(device)
        self.state = copied(state_of(model, optimizer, scaler)) if save_state else None


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
        load_scale(state["scaler"]["scale"], scaler, device)
        scaler._growth_tracker.copy_(state["scaler"]["growth_tracker"])  # type: ignore[union-attr]


def load_scale(scale: float | torch.Tensor, scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Gives a scaler, which may be new, a loss scale."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    scaler._scale.copy_(torch.as_tensor(scale))  # type: ignore[union-attr]


@torch.no_grad()
def copied(value: Any) -> Any:
    """`value` with clones of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [copied(each) for each in value]
    return value


def write(
    directory: Path,
    run: Run,
    batch: Any,
    before: Before | None,
    history: History,
    record: StepRecord,
    *,
    reason: str,
    local: bool,
    sampled: bool,
) -> Path:
    """Writes the folder of a bad step, and returns it."""
    path = bad_step.folder(directory, record.step, run.process()[0])
    path.mkdir(parents=True, exist_ok=True)
    places: list[str] = []
    torch.save({"batch": on_host(batch, places), "places": places}, path / "batch.pt")
    state = None if before is None else before.state
    if before is not None:
        torch.save(on_host(before.generators), path / "rng.pt")
    if state is not None:
        torch.save(on_host(state), path / "state.pt")
    bad = run.described(
        record,
        reason,
        front="pytorch",
        local=local,
        versions=versions(),
        sampled=sampled,
        kept=state is not None,
    )
    bad_step.write(path, bad, history)
    return path


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
