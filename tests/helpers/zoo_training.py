"""Training a row of the zoo on the CPU and on the lazy device, with what the device did for it."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from zoo import Row

import xla_amp
from xla_amp.testing import counts

STEPS = 5
WARMUP = 1
"""Steps that build executables; the optimizer has its state before, so one program serves all steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Losses of a training, and what it cost per step once nothing is built any more (0 on the CPU)."""

    losses: list[float]
    executables: float = 0.0
    host_syncs: float = 0.0
    host_values: float = 0.0
    """Questions about the inputs that the host answered without waiting."""
    compilations: int = 0
    fallbacks: int = 0


def train(row: Row, device: Any, low: bool, policy: str | None = None) -> Run:
    """Five steps of AdamW (learning rate 1e-3) on one batch, from the weights of seed 0.

    Args:
        row: what to train.
        device: ``"cpu"`` or the lazy device.
        low: whether forward and loss run in bfloat16 autocast (``torch.autocast`` on the CPU).
        policy: of the lazy device's autocast.
    """
    torch.manual_seed(0)
    model, batch = row.build(), row.batch()
    lazy = torch.device(device).type != "cpu"
    model.to(device)
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if lazy:
        xla_amp.sync()
    losses = []
    with counts() as whole:
        for step in range(STEPS):
            if step == WARMUP:
                before = whole()
            optimizer.zero_grad()
            with _region(device, low, policy):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if lazy:
                xla_amp.sync()
    if not lazy:
        return Run(losses=[loss.item() for loss in losses])
    steady = {name: (whole()[name] - before[name]) / (STEPS - WARMUP) for name in before}
    return Run(
        losses=torch.stack(losses).tolist(),
        executables=steady["executions"],
        host_syncs=steady["host_syncs"],
        host_values=steady["host_values"],
        compilations=whole.compilations,
        fallbacks=whole.fallbacks,
    )


def _region(device: Any, low: bool, policy: str | None) -> Any:
    if not low:
        return contextlib.nullcontext()
    if torch.device(device).type == "cpu":
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return xla_amp.autocast(device, dtype=torch.bfloat16, policy=policy)


def difference(got: Run, wanted: Run) -> float:
    """Largest relative difference of two trainings' losses, step by step."""
    return max(abs(a - b) / abs(b) for a, b in zip(got.losses, wanted.losses, strict=True))
