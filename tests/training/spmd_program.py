"""Eight steps of one model on eight virtual devices, in the layout that the first argument names; prints JSON."""

from __future__ import annotations

import collections
import json
import os
import re
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp.engines.jax import cut, storage

LAYOUTS = {
    "single": ({}, {}),
    "data": ({"data": 8}, {}),
    "sharded": ({"data": 8}, dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), ("data",))),
    "tensor": (
        {"data": 4, "model": 2},
        {"0.weight": ("model", None), "0.bias": ("model",), "2.weight": (None, "model")},
    ),
}
"""Name -> axes of the mesh, and how parameters are split."""
STEPS, OVERFLOWS = 8, 5
COLLECTIVES = r"= [^=]*?\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("


def main(name: str) -> None:
    axes, specs = LAYOUTS[name]
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)
    scaler = xla_amp.GradScaler(device, init_scale=2.0**10)
    mesh = xla_amp.make_mesh(axes) if axes else None
    parameters = dict(model.named_parameters())
    for key, spec in specs.items():
        xla_amp.mark_sharding(parameters[key], mesh, spec)

    generator = torch.Generator().manual_seed(1)
    losses = []
    for number in range(STEPS):
        x = torch.randn(16, 32, generator=generator).to(device)
        y = torch.randint(16, (16,), generator=generator).to(device)
        if number == OVERFLOWS:
            x[3, 3] = float("inf")  # in the part of one device
        if mesh is not None:
            for batch in (x, y):
                xla_amp.mark_sharding(batch, mesh, ("data",))
        xla_amp.sync()
        before = xla_amp.metrics()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        xla_amp.sync()
        after = xla_amp.metrics()
    program = max(cut.programs(), key=lambda program: program.operations)
    shards = {
        key: [
            storage.buffer_of(tensor).array.addressable_shards[0].data.size / tensor.numel()
            for tensor in (parameter, optimizer.state[parameter]["exp_avg"])
        ]
        for key, parameter in parameters.items()
    }
    result = {
        "losses": torch.stack(losses).tolist(),
        "weights": [p.double().sum().item() for p in parameters.values()],
        "scale": scaler.get_scale(),
        "skipped": int(scaler.skipped_steps()),
        "steady": {key: after[key] - before[key] for key in ("executions", "compilations", "host_syncs")},
        "collectives": collections.Counter(re.findall(COLLECTIVES, program.optimized_hlo())),
        "shards": shards,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
