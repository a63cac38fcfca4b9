"""Training steps as StableHLO for several devices that are not here; test_spmd_targets.py compiles them.

The steps before run on virtual CPU devices, so that the optimizer has its state; then the recorded step is compiled
again for the platform.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] += " --xla_allow_excess_precision=false --xla_backend_optimization_level=0"

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
from xla_amp.lazy.programs import mesh, pjrt

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


def step(model, optimizer, scaler, device, marked, batches, reduce=None):
    """One with batches of the CPU; the last of them are labels."""
    *given, labels = (batch.to(device) for batch in batches)
    if marked is not None:
        for batch in (*given, labels):
            xla_amp.mark_sharding(batch, marked, ("data",))
    optimizer.zero_grad()
    with xla_amp.autocast(device, policy="tpu"):
        loss = F.cross_entropy(model(*given), labels)
    scaler.scale(loss).backward()
    if reduce is not None:
        reduce(optimizer)
    scaler.step(optimizer)
    scaler.update()
    xla_amp.sync()


def train(marked, specs, reduce=None):
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
        batches = torch.randn(32, 64), torch.randint(32, (32,))
        step(model, optimizer, scaler, device, marked, batches, reduce)


def laid_out(layout, platform):
    axes, specs = LAYOUTS[layout]
    count = DEVICES[platform]
    extents = [extent or count // (2 if len(axes) > 1 else 1) for _, extent in axes]
    mesh.active = None
    marked = Mesh(np.array(jax.devices()[:count]).reshape(extents), tuple(name for name, _ in axes))
    try:
        train(marked, specs)
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


class Model(nn.Module):
    """A table, a convolution, float32 weights and a bfloat16 one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 256)
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.up = nn.Linear(256, 256)
        self.low = nn.Linear(256, 128, dtype=torch.bfloat16)
        self.head = nn.Linear(128, 32)

    def forward(self, x, tokens):
        x = F.relu(self.conv(x)).flatten(1) + self.table(tokens)
        return self.head(F.relu(self.low(F.relu(self.up(x)))))


def sharded():
    """The program of the steady step of 4,096 images; the table is split by columns, as recipes do."""
    marked, device = Mesh(np.array(jax.devices()), ("data",)), xla_amp.xla_device()
    model = Model().to(device)
    for name, parameter in model.named_parameters():
        xla_amp.mark_sharding(parameter, marked, (None, "data") if "table" in name else ("data",))
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=1e-2)
    scaler = xla_amp.GradScaler(device, enabled=False)
    for _ in range(2):
        batches = torch.randn(4096, 4, 4, 4), torch.randint(64, (4096,)), torch.randint(32, (4096,))
        step(model, optimizer, scaler, device, marked, batches)


class Beside(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.conv, self.linear, self.low = nn.Conv2d(4, 4, 1), nn.Linear(4, 4), nn.Linear(4, 4, dtype=dtype)

    def forward(self, x):
        return self.conv(x[:, :, None, None]).flatten(1), self.linear(2 * x), self.low(x.to(self.low.weight.dtype))


def gradients(dtype):
    """Of weights that see ones or twos.  The parts are 256.1 and -255.9, or twice that."""
    marked, device = Mesh(np.array(jax.devices()[:8]), ("data",)), xla_amp.xla_device()
    model = Beside(dtype).to(device)
    x, factor = torch.ones(16, 4).to(device), torch.tensor([256, 0.1, -256, 0.1] * 4)[:, None].to(device)
    for batch in (x, factor):
        xla_amp.mark_sharding(batch, marked, ("data",))
    with xla_amp.autocast(device, dtype, policy="tpu"):
        results = model(x)
    sum((result.float() * factor).sum() for result in results).backward()
    return {name: p.grad.float().cpu().flatten().tolist() for name, p in model.named_parameters()}


def sharded_texts(rank, world):
    """The step of a model with sharded weights of all kinds, by platform."""
    sharded()
    return {platform: text_for(platform) for platform in DEVICES}


def numbers(rank, world):
    """Gradients of which each device has a part that a low dtype would round: by the forms for TPUs, on the CPU."""
    xla_amp.xla_device()
    pjrt.platform = lambda: "tpu"
    return {name: gradients(getattr(torch, name)) for name in ("bfloat16", "float16")}
