"""A few training steps on the XLA engine in use: losses, scales and decisions as JSON on the last line.

    XLA_AMP_ENGINE=jax python tests/torch_xla_engine/same_step.py

`--write` stores them in same_step.json, against which both engines are tested: they need different versions of torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree
from xla_amp.backends import base

STORED = Path(__file__).with_name("same_step.json")
POLICIES = {"fp32": None, "bf16": "tpu", "fp16": "gpu"}


def model() -> nn.Module:
    """A small network with a convolution, norms, an embedding's worth of softmax and linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 10),
        nn.Softmax(-1),
        nn.Linear(10, 10),
    )


def run(precision: str, steps: int = 5) -> dict[str, Any]:
    """One training run from a fixed seed: losses by step, scale at the end, what explain reports of the first step."""
    torch.manual_seed(0)
    network = model()
    batches = [(torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))) for _ in range(steps)]
    device = xla_amp.xla_device()
    network.to(device)
    optimizer = syncfree.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    scaler = GradScaler("xla", init_scale=2.0**10, growth_interval=2, enabled=precision == "fp16")
    losses, decisions = [], []
    for x, y in batches:
        optimizer.zero_grad()
        region = xla_amp.autocast("xla", policy=POLICIES[precision], enabled=precision != "fp32")
        with xla_amp.explain() as report, region:
            loss = nn.functional.cross_entropy(network(x.to(device)), y.to(device))
        if not losses:
            # Not what operands were before: torch_xla's batch_norm of float16 gives float32, torch's float16.
            decisions = [
                [row[name] for name in ("operation", "module", "cast", "layer", "after", "result")]
                for row in report.rows()
                if row["rule"]
            ]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        base.sync()
    return {"losses": losses, "scale": scaler.get_scale(), "decisions": decisions}


if __name__ == "__main__":
    found = {precision: run(precision) for precision in POLICIES}
    if "--write" in sys.argv:
        STORED.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"engine": base.select().DEVICE_TYPE, **found}))
