"""A training step as StableHLO for several devices that are not here; test_spmd_targets.py compiles it for them.

The steps before run on virtual CPU devices, so that the optimizer has its state; then the recorded step is compiled
again for the platform.
"""

from __future__ import annotations

import os

import jax
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import Mesh
from other_platform import text_for
from torch import nn

import xla_amp
from xla_amp import xla_model as xm
from xla_amp.common import config
from xla_amp.lazy.programs import mesh

DEVICES = {"gpu": 8, "tpu": 16}
LAYOUTS = {
    "data": ((("data", None),), {}),
    "tensor": (
        (("data", None), ("model", 2)),
        {"0.weight": ("model", None), "0.bias": ("model",), "2.weight": (None, "model")},
    ),
}
"""Name -> axes of the mesh with their extents (None: the rest), and how parameters are split."""
REPLICAS = {"replicas": None, "replicas in bfloat16": torch.bfloat16}
"""Name -> in what dtype processes add their gradients."""
CASES = [("data", "gpu"), ("tensor", "gpu"), ("data", "tpu")]


def step(model, optimizer, scaler, device, marked, reduce):
    x, y = torch.randn(32, 64).to(device), torch.randint(32, (32,)).to(device)
    for batch in (x, y):
        if marked is not None:
            xla_amp.mark_sharding(batch, marked, ("data",))
    optimizer.zero_grad()
    with xla_amp.autocast(device, policy="tpu"):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    reduce(optimizer)
    scaler.step(optimizer)
    scaler.update()
    xla_amp.sync()


def train(marked, specs, reduce):
    """Two steps, of which the second is steady."""
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).to(device)
    for name, parameter in model.named_parameters():
        if name in specs:
            xla_amp.mark_sharding(parameter, marked, specs[name])
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)
    scaler = xla_amp.GradScaler(device)
    for _ in range(2):
        step(model, optimizer, scaler, device, marked, reduce)


def laid_out(layout, platform):
    axes, specs = LAYOUTS[layout]
    count = DEVICES[platform]
    extents = [extent or count // (2 if len(axes) > 1 else 1) for _, extent in axes]
    mesh.active = None
    marked = Mesh(np.array(jax.devices()[:count]).reshape(extents), tuple(name for name, _ in axes))
    try:
        train(marked, specs, lambda optimizer: None)
        return text_for(platform)
    finally:
        mesh.active = None


def replicated(dtype):
    """By platform; one process stands for all while the step is recorded, with collectives over a mesh of one."""
    mesh.active, mesh.replicas = Mesh(np.array(jax.devices()[:1]), (mesh.AXIS,)), True
    config.place_process(rank=0, world_size=2, port=1)
    try:
        train(None, {}, lambda optimizer: xm.reduce_gradients(optimizer, dtype=dtype))
        for platform, count in DEVICES.items():
            mesh.active = Mesh(np.array(jax.devices()[:count]), (mesh.AXIS,))
            yield platform, text_for(platform)
    finally:
        mesh.active, mesh.replicas = None, False
        del os.environ["WORLD_SIZE"]


def texts(rank, world):
    """By layout and platform."""
    xla_amp.xla_device()
    found = {f"{layout}-{platform}": laid_out(layout, platform) for layout, platform in CASES}
    for name, dtype in REPLICAS.items():
        found |= {f"{name}-{platform}": text for platform, text in replicated(dtype)}
    return found
