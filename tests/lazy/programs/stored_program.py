"""A training step, a captured one, and a LAPACK call; prints the bits of the results and the metrics."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp import xla_model as xm


def together(rank: int, sharded: str, folder: str) -> None:
    """A step in which two processes add their gradients, or that both run on their devices."""
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(0 if sharded else rank)
    x, y = torch.randn(8, 8, generator=data).to(device), torch.randint(4, (8,), generator=data).to(device)
    if sharded:
        mesh = xla_amp.make_mesh({"data": 4})
        xla_amp.mark_sharding(x, mesh, ("data", None))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if not sharded:
            xm.reduce_gradients(optimizer)
        optimizer.step()
        losses.append(loss.item())
    Path(folder, f"{rank}.json").write_text(json.dumps({"losses": losses, **xla_amp.metrics()}))


def main() -> None:
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(8, 3, 8, 8).to(device), torch.randint(4, (8,)).to(device)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with xla_amp.autocast(device):
            loss = F.cross_entropy(F.dropout(model(x), 0.2), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(x, y).item() for _ in range(3)]
    captured = xla_amp.compile(step)
    losses += torch.stack([captured(x, y) for _ in range(4)]).tolist()
    square = torch.randn(5, 5).to(device)
    losses.append(torch.linalg.eigvalsh(square @ square.T).sum().item())
    xla_amp.sync(wait=True)
    print(json.dumps({"losses": losses, "replays": captured.replays, **xla_amp.metrics()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["together"]:
        xla_amp.launch(together, 2, args=tuple(sys.argv[2:]), timeout=300)
    else:
        main()
