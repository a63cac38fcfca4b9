"""Captured steps with the optimizers of torch.optim as users make them, whose learning rate a schedule changes."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from optimizer_runs import OPTIONS
from torch import nn

import xla_amp
from xla_amp import GradScaler
from xla_amp.testing import counts as counted

STEPS = 9


class Network(nn.Module):
    """Its weights are matrices, a vector and a scalar; those of a lookup only, for SparseAdam; matrices, for Muon."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        if name == "SparseAdam":
            self.table = nn.Embedding(9, 4, sparse=True)
        else:
            self.first = nn.Linear(4, 6, bias=name != "Muon")
            self.second = nn.Linear(6, 4, bias=False)
            if name != "Muon":
                self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "table"):
            return self.table((x[:, 0] * 3).long().clamp(0, 8))
        return self.second(torch.tanh(self.first(x))) * getattr(self, "factor", 1.0)


def train(device, name, options, scaled=False, compiled=False, kind=None, steps=STEPS):
    """A network after some steps, its optimizer and the step; a learning rate is halved after each."""
    model = Network(name).to(device)
    optimizer = (kind or getattr(torch.optim, name))(model.parameters(), **{"lr": 0.02, **OPTIONS[name], **options})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + 0.1 * epoch))
    cpu = torch.device(device).type == "cpu"
    scaler = torch.amp.GradScaler("cpu", enabled=scaled) if cpu else GradScaler(enabled=scaled)
    batches = [torch.rand(8, 4, generator=torch.Generator().manual_seed(n)).to(device) for n in range(steps)]

    def step(x):
        if name != "SparseAdam":
            optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if name == "SparseAdam":  # no replay leaves a sparse gradient
            optimizer.zero_grad()
        return loss

    called = xla_amp.compile(step, strict=True) if compiled else step
    for batch in batches:
        called(batch)
        if not cpu:
            xla_amp.sync()
        schedule.step()
    return model, optimizer, called


def forms():
    for name in OPTIONS:
        taken = inspect.signature(getattr(torch.optim, name)).parameters
        for options in ({}, {"foreach": True}, {"foreach": False}, {"fused": False}):
            if all(option in taken for option in options) and (name, "foreach") != ("Adafactor", *options):
                yield pytest.param(name, options, id=f"{name}-{options or 'default'}")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize(("name", "options"), list(forms()))
def test_each_replays_from_the_fourth_call_with_one_capture(name, options, scaled):
    device = xla_amp.xla_device()
    with warnings.catch_warnings(), counted() as counts:
        warnings.simplefilter("error")
        model, optimizer, step = train(device, name, options, scaled, compiled=True)
    assert step.replays == STEPS - 3, step.reasons
    (captures,) = step._captures.values()
    assert len(captures.cache) == 1
    assert counts.host_syncs == 0
    recorded, other, _ = train(device, name, options, scaled)
    expected, _, _ = train("cpu", name, options, scaled)
    for ours, same, theirs in zip(model.parameters(), recorded.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, same)
        atol = 2e-3 if name == "Muon" else 2e-6  # Muon orthogonalizes in bfloat16
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=2e-5, atol=atol)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
