"""Eight steps of one model on virtual devices, a checkpoint, and two more: a scenario of test_spmd.py."""

from __future__ import annotations

from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp.lazy.distributed import checkpoint
from xla_amp.lazy.tensors import tensor_io

DEVICES = jax.device_count()
LAYOUTS = {
    "single": ({}, {}),
    "data": ({"data": DEVICES}, {}),
    "sharded": ({"data": DEVICES}, dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), ("data",))),
}
"""Name -> axes of the mesh, and how parameters are split."""
STEPS, OVERFLOWS, MORE = 8, 5, 2


def layout(rank: int, world: int, name: str, what: str, folder: str) -> dict[str, Any]:
    """`what` is "save", or "load", which takes the first eight steps from the checkpoint."""
    axes, specs = LAYOUTS[name]
    device = xla_amp.xla_device()
    torch.manual_seed(0 if what == "save" else 1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)
    scaler = xla_amp.GradScaler(device, init_scale=2.0**10)
    mesh = xla_amp.make_mesh(axes) if axes else None
    parameters = dict(model.named_parameters())
    for key, spec in specs.items():
        xla_amp.mark_sharding(parameters[key], mesh, spec)

    def step(number):
        generator = torch.Generator().manual_seed(number)
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
        kept = loss.detach()
        xla_amp.sync()
        after = xla_amp.metrics()
        return kept, {key: after[key] - before[key] for key in ("executions", "compilations", "host_syncs")}

    def weights():
        return [p.double().sum().item() for p in parameters.values()]

    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    result = {}
    if what == "save":
        steps = [step(number) for number in range(STEPS)]
        result |= {
            "losses": torch.stack([loss for loss, _ in steps]).tolist(),
            "steady": steps[-1][1],
            "skipped": int(scaler.skipped_steps()),
        }
        checkpoint.save({**state, "steps": STEPS, "far": torch.tensor([2**40], device=device)}, folder)
    else:
        result["rest"] = {key: torch.as_tensor(value).tolist() for key, value in checkpoint.load(state, folder).items()}
    result |= {
        "weights": weights(),
        "moments": [optimizer.state[p]["exp_avg_sq"].double().sum().item() for p in parameters.values()],
        "scale": scaler.get_scale(),
        "shards": {
            key: [
                tensor_io.buffer_of(tensor).array.addressable_shards[0].data.size / tensor.numel()
                for tensor in (parameter, optimizer.state[parameter]["exp_avg"])
            ]
            for key, parameter in parameters.items()
        },
        "later": [step(STEPS + more)[0].item() for more in range(MORE)],
    }
    return result
