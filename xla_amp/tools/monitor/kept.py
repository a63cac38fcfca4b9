"""The first bad step of a run in PyTorch: its state, batch and random state in a file, and how they are restored.

``DIRECTORY/step-N/rank-0.pt`` has them, one file for each process, which ``torch.load(weights_only=True)`` reads.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from xla_amp.backends import base, devices, step_state, trees
from xla_amp.errors import FileError, StepError
from xla_amp.tools.monitor.history import StepRecord


def save(
    folder: Path, record: StepRecord, batch: Any, generators: Any, model: Any, optimizer: Any, scaler: Any
) -> None:
    """Writes a step that `scaler` has skipped, so that the state is that before it, but for the scale.

    `record` has the scale that the step used; `generators` is `step_state.random_state` before the step; the other
    objects are as they are after it.

    Raises:
        TypeError: something in `batch` is no tensor, number, text, list, tuple or dict.
    """
    leaves = trees.tree_leaves(batch)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | bool | int | float | complex | str | bytes | None):
            raise TypeError(f"expected a batch of tensors, numbers, texts, lists, tuples and dicts, got {type(leaf)}")
    kept = {
        "record": dataclasses.asdict(record),
        "batch": batch,
        "on_device": [leaf.device.type != "cpu" for leaf in leaves if isinstance(leaf, torch.Tensor)],
        "random": generators,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": {**scaler.state_dict(), "scale": record.loss_scale},
    }
    folder.mkdir(parents=True, exist_ok=True)
    on_host = trees.tree_map_only(torch.Tensor, lambda each: each.detach().cpu(), kept)
    torch.save(on_host, folder / f"rank-{_rank(device_of(model))}.pt")


def restore(path: str | os.PathLike[str], objects: Sequence[Any]) -> tuple[Any, ...]:
    """Gives model, optimizer and scaler among `objects`, and the random generators, the state before a kept step.

    Args:
        path: ``DIRECTORY/step-N``; the file of this process if there is one, otherwise the first.
        objects: that the step reaches.

    Returns:
        The batch, on the devices where it was.

    Raises:
        FileError: there is no kept step, or it cannot be read.
        StepError: a model, optimizer or scaler is missing.
    """
    files = {file.name: file for file in sorted(Path(path).glob("rank-*.pt"))}
    if not files:
        raise FileError(f"{path}: no step is kept here: expected a folder step-N with a file rank-0.pt")
    own = base.processes().ordinal() if base.in_processes() else 0
    file = files.get(f"rank-{own}.pt", next(iter(files.values())))
    try:
        kept = torch.load(file, weights_only=True)
        names, sizes = kept["model"].keys(), _sizes(kept["optimizer"])
    except Exception as error:  # torch.load raises anything for a file of another kind
        raise FileError(f"{file}: no kept step of a monitor: {type(error).__name__}: {error}") from error
    model = _first(objects, torch.nn.Module, lambda each: each.state_dict().keys() == names)
    optimizer = _first(objects, torch.optim.Optimizer, lambda each: _sizes(each.state_dict()) == sizes)
    scaler = _first(objects, torch.amp.GradScaler, torch.amp.GradScaler.is_enabled)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    scaler.load_state_dict(kept["scaler"])
    step_state.set_random_state(kept["random"])
    moves, device = iter(kept["on_device"]), device_of(model)
    return tuple(
        trees.tree_map_only(torch.Tensor, lambda each: each.to(device) if next(moves) else each, kept["batch"])
    )


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _rank(device: torch.device) -> int:
    if devices.is_xla(device.type):
        return base.processes().ordinal()
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _sizes(state: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state["param_groups"]]


def _first(objects: Sequence[Any], kind: type, fits: Callable[[Any], bool]) -> Any:
    for each in objects:
        if isinstance(each, kind) and fits(each):
            return each
    seen = ", ".join(type(each).__name__ for each in objects) or "nothing"
    raise StepError(
        f"find_overflow(step, kept=...): expected a {kind.__name__} that the kept state fits, and the step reaches "
        f"{seen}; make it as in the run, and pass objects=[model, optimizer, scaler]"
    )
