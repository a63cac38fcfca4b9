"""A training step in several processes, for test_processes.py; run as a program it prints what each process saw."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp import xla_model as xm

STEPS = 20


def model_and_optimizer(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    return model, xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)


def train(rank, folder, world, overflow):
    """`overflow`: "none", "one" (on one process, at random steps), "unreduced" (the same, with its own gradients)."""
    device = xla_amp.xla_device()
    model, optimizer = model_and_optimizer(device)
    scaler = xla_amp.GradScaler(device, init_scale=2.0**10, growth_interval=4)
    data, chance = torch.Generator().manual_seed(1), random.Random(7)
    losses = []
    for _ in range(STEPS):
        x, y = torch.randn(8, 16, generator=data), torch.randint(4, (8,), generator=data)
        bad = chance.random() < 0.25 and overflow != "none"
        where = chance.randrange(world)
        part = slice(rank * 8 // world, (rank + 1) * 8 // world)
        x, y = x[part].to(device), y[part].to(device)
        if bad and where == rank:
            x[0, 0] = float("inf")
        xla_amp.sync()
        before = xla_amp.metrics()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if overflow != "unreduced":
            xm.reduce_gradients(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses.append(xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1 / world))
        xla_amp.sync()
        after = xla_amp.metrics()
    result = {
        "losses": torch.stack(losses).tolist(),
        "weights": [p.detach().cpu().numpy().tobytes().hex() for p in model.parameters()],
        "sum": sum(p.detach().double().sum().item() for p in model.parameters()),
        "scale": scaler.get_scale(),
        "skipped": int(scaler.skipped_steps()),
        "steady": {key: after[key] - before[key] for key in ("executions", "compilations", "host_syncs")},
        "ordinal": [xm.get_ordinal(), xm.xrt_world_size()],
        "met": [part.decode() for part in xm.rendezvous("end", str(rank).encode())],
        "most": xm.mesh_reduce("most", rank, max),
    }
    Path(folder, f"{world}-{overflow}-{rank}.json").write_text(json.dumps(result))


def fail(rank, folder):
    device = xla_amp.xla_device()
    if rank == 1:
        raise RuntimeError("this one has had enough")
    torch.ones(2, device=device).sum().item()
    xm.rendezvous("never")


def train_all(rank, folder, world, overflows):
    for overflow in overflows:
        train(rank, folder, world, overflow)


if __name__ == "__main__":
    folder, world, *overflows = sys.argv[1:]
    if overflows == ["fail"]:
        xla_amp.launch(fail, int(world), (folder,))
    elif int(world) == 1:
        train_all(0, folder, 1, overflows)
    else:
        xla_amp.launch(train_all, int(world), (folder, int(world), overflows))
