"""Gradients of weights that a mesh adds: scenarios of test_gradient_sums.py."""

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
from xla_amp.lazy.programs import pjrt


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


def step():
    """The program of the steady step of 4,096 images; the table is split by columns, as recipes do."""
    marked, device = Mesh(np.array(jax.devices()), ("data",)), xla_amp.xla_device()
    model = Model().to(device)
    for name, parameter in model.named_parameters():
        xla_amp.mark_sharding(parameter, marked, (None, "data") if "table" in name else ("data",))
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        x, tokens, y = torch.randn(4096, 4, 4, 4), torch.randint(64, (4096,)), torch.randint(32, (4096,))
        x, tokens, y = (batch.to(device) for batch in (x, tokens, y))
        for batch in (x, tokens, y):
            xla_amp.mark_sharding(batch, marked, ("data",))
        optimizer.zero_grad()
        with xla_amp.autocast(device, policy="tpu"):
            loss = F.cross_entropy(model(x, tokens), y)
        loss.backward()
        optimizer.step()
        xla_amp.sync()


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


def programs(rank, world):
    """The step of a model with sharded weights of all kinds, by platform."""
    step()
    return {platform: text_for(platform) for platform in ("gpu", "tpu")}


def numbers(rank, world):
    """Gradients of which each device has a part that a low dtype would round: by the forms for TPUs, on the CPU."""
    xla_amp.xla_device()
    pjrt.platform = lambda: "tpu"
    return {name: gradients(getattr(torch, name)) for name in ("bfloat16", "float16")}
