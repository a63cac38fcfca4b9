"""A captured step on eight virtual devices, and the same recorded; prints JSON."""

from __future__ import annotations

import json
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import torch
import torch.nn.functional as F
from torch import nn

import xla_amp

SPECS = {"0.weight": ("model", None), "0.bias": ("model",), "3.weight": (None, "model")}
STEPS, OVERFLOWS = 9, 7


def train(compiled: bool) -> dict[str, object]:
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 8)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)
    scaler = xla_amp.GradScaler(device, init_scale=2.0**10)
    mesh = xla_amp.make_mesh({"data": 4, "model": 2})
    for name, spec in SPECS.items():
        xla_amp.mark_sharding(dict(model.named_parameters())[name], mesh, spec)

    def step(x, y):
        optimizer.zero_grad()
        with xla_amp.autocast(device):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    function = xla_amp.compile(step, strict=True) if compiled else step
    losses = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 16, generator=generator) * (float("inf") if number == OVERFLOWS else 1)
        batch = x.to(device), torch.randint(8, (8,), generator=generator).to(device)
        for tensor in batch:
            xla_amp.mark_sharding(tensor, mesh, ("data",))
        losses.append(function(*batch))
        xla_amp.sync()
    bits = [loss.cpu().view(torch.int32).item() for loss in losses]
    bits += [p.detach().cpu().view(torch.int32).sum().item() for p in model.parameters()]
    return {"bits": bits, "replays": function.replays if compiled else 0, "scale": scaler.get_scale()}


if __name__ == "__main__":
    print(json.dumps({"recorded": train(False), "replayed": train(True)}))
