"""A training step as StableHLO for several devices that are not here; test_spmd_targets.py compiles it for them.

    python target_program.py FOLDER

writes ``FOLDER/<layout>-<platform>.mlir`` for each of `CASES`.  The steps before run on virtual CPU devices, so that
the optimizer has its state; then the recorded step is compiled again for the platform.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"

import jax
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import Mesh
from torch import nn

import xla_amp
from xla_amp import xla_model as xm
from xla_amp.common import config
from xla_amp.lazy import private_api
from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.programs import execute, mesh
from xla_amp.lazy.programs.compile import build

DEVICES = {"gpu": 8, "tpu": 16}
LAYOUTS = {
    "data": ((("data", None),), {}),
    "sharded": ((("data", None),), dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), ("data",))),
    "tensor": (
        (("data", None), ("model", 2)),
        {"0.weight": ("model", None), "0.bias": ("model",), "2.weight": (None, "model")},
    ),
}
"""Name -> axes of the mesh with their extents (None: the rest), and how parameters are split."""
REPLICAS = {"replicas": None, "replicas in bfloat16": torch.bfloat16}
"""Name -> in what dtype processes add their gradients."""
CASES = [("data", "gpu"), ("sharded", "gpu"), ("tensor", "gpu"), ("data", "tpu"), ("sharded", "tpu")]


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


def trained(marked, specs, reduce):
    """The key of the steady step's program."""
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
    return next(reversed(execute._programs))


def text(key, platform):
    """The program of a recorded step as JAX writes it for `platform`."""
    tape = Tape(key.code)
    parameters = {node.first: node.instruction.outs[0] for node in tape if node.is_parameter}
    numbers = tuple(sum(getattr(node.instruction, what) for node in tape) for what in ("floats", "ints"))
    program = build(key, list(parameters), list(parameters.values()), numbers, 1, platform)
    with private_api.x64():
        platforms = ({"gpu": "cuda"}.get(platform, platform),)
        return program.call.trace(*program.abstract).lower(lowering_platforms=platforms).as_text()


def laid_out(layout, platform):
    axes, specs = LAYOUTS[layout]
    count = DEVICES[platform]
    extents = [extent or count // (2 if len(axes) > 1 else 1) for _, extent in axes]
    mesh.active = None
    marked = Mesh(np.array(jax.devices()[:count]).reshape(extents), tuple(name for name, _ in axes))
    try:
        return text(trained(marked, specs, lambda optimizer: None), platform)
    finally:
        mesh.active = None


def replicated(dtype):
    """By platform; one process stands for all while the step is recorded, with collectives over a mesh of one."""
    mesh.active, mesh.replicas = Mesh(np.array(jax.devices()[:1]), (mesh.AXIS,)), True
    config.place_process(rank=0, world_size=2, port=1)
    try:
        key = trained(None, {}, lambda optimizer: xm.reduce_gradients(optimizer, dtype=dtype))
        for platform, count in DEVICES.items():
            mesh.active = Mesh(np.array(jax.devices()[:count]), (mesh.AXIS,))
            yield platform, text(key, platform)
    finally:
        mesh.active, mesh.replicas = None, False
        del os.environ["WORLD_SIZE"]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    xla_amp.xla_device()
    for layout, platform in CASES:
        (folder / f"{layout}-{platform}.mlir").write_text(laid_out(layout, platform))
    for name, dtype in REPLICAS.items():
        for platform, program in replicated(dtype):
            (folder / f"{name}-{platform}.mlir").write_text(program)
