"""Steps with fully sharded weights and 8-bit products; test_float8_gather.py reads what this writes.

    python float8_gather_program.py FOLDER

writes ``FOLDER/<front>.mlir``, a step for eight GPUs by each front, and prints how far results of eight devices are
from those of one.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import target_program  # first: it sets the count of devices

os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn

import xla_amp
from xla_amp.lazy.programs import execute

RULES = {"linear": "fp8", "matmul": "fp8"}
WIDTHS = (64, 96, 64)
ROWS = 4096


def integers(*shape: int) -> np.ndarray:
    """Of 7 bits, so that sums of their products are exact in any order."""
    return np.random.default_rng(len(shape) + shape[0]).integers(-99, 99, shape).astype(np.float32)


def apart(one: Any, eight: Any) -> list[float]:
    """The largest difference of each result, relative to its largest element."""
    pairs = ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(one, eight, strict=True))
    return [float(abs(a - b).max() / abs(a).max()) for a, b in pairs]


def jax_step(weights, x, given):
    def loss(weights, x):
        for weight in weights:
            x = x @ weight
        return (x.astype(jnp.float32) * given).sum(), x

    (_, result), gradients = jax.value_and_grad(loss, has_aux=True)(weights, x)
    return result, gradients


def in_jax() -> tuple[str, list[float]]:
    """The program for eight GPUs, and how far the results are from those of one."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    weights = [integers(*each) for each in itertools.pairwise(WIDTHS)]
    arguments = weights, integers(ROWS, WIDTHS[0]), integers(ROWS, WIDTHS[-1])
    step = xla_amp.jax.autocast(jax_step, rules=RULES)
    one, split = jax.jit(step)(*arguments), jax.device_put(arguments, rows)
    traced = jax.jit(step, out_shardings=rows).trace(*split)
    eight = traced.lower().compile()(*split)
    return traced.lower(lowering_platforms=("cuda",)).as_text(), apart(jax.tree.leaves(one), jax.tree.leaves(eight))


def in_torch() -> tuple[str, list[float]]:
    """The same of the lazy device."""
    device = xla_amp.xla_device()
    found = []
    for mesh in (None, Mesh(np.array(jax.devices()[:8]), ("data",))):
        model = nn.Sequential(*(nn.Linear(*each, bias=False) for each in itertools.pairwise(WIDTHS)))
        for weight in model.parameters():
            weight.data = torch.from_numpy(integers(*weight.shape))
        model = model.to(device)
        if mesh is not None:
            xla_amp.shard(model, mesh, "fsdp")
        for _ in range(2):
            model.zero_grad()
            x, given = (torch.from_numpy(integers(ROWS, width)).to(device) for width in (WIDTHS[0], WIDTHS[-1]))
            if mesh is not None:
                xla_amp.mark_sharding(given, mesh, ("data",))
            with xla_amp.autocast(device, torch.bfloat16, rules=RULES):
                result = model(x)
            (result.float() * given).sum().backward()
            xla_amp.sync()
        key = next(reversed(execute._programs))
        found.append(
            [each.float().cpu() for each in (result.detach(), *(weight.grad for weight in model.parameters()))]
        )
    return target_program.text(key, "gpu"), apart(*found)


if __name__ == "__main__":
    differences = {}
    for name, run in (("jax", in_jax), ("torch", in_torch)):
        program, differences[name] = run()
        Path(sys.argv[1], f"{name}.mlir").write_text(program)
    print(json.dumps(differences))
