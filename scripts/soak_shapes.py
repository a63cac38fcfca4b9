"""Train a small MLP with a new batch size in each step; print what the process and the caches hold.

    python scripts/soak_shapes.py --shapes 500
    XLA_AMP_PROGRAM_MEMORY=64M python scripts/soak_shapes.py --shapes 500 --evaluate

Each shape is one more program (with ``--evaluate`` two, and a read of the host), of which the newest are kept, up to
``XLA_AMP_PROGRAM_MEMORY``.  Resident memory after a hundred shapes and at the end should be the same within a few
percent, once the limit is reached: JAX's own caches, of 2,048 or 4,096 entries each, are full after some 300 shapes.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from pathlib import Path

import jax
import torch

import xla_amp
from xla_amp.errors import RecompileWarning
from xla_amp.lazy.graph import trace as graph


def resident() -> float:
    """Resident memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024


def main() -> None:
    """Runs the loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=500, help="batch sizes")
    parser.add_argument("--every", type=int, default=50, help="shapes between two lines of output")
    parser.add_argument("--evaluate", action="store_true", help="evaluate a ragged batch after each step")
    options = parser.parse_args()
    warnings.simplefilter("ignore", RecompileWarning)

    device = xla_amp.xla_device()
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin = time.monotonic()
    print("shapes  resident MiB  executables  estimated MiB  dropped  instructions  objects  seconds")
    for shape in range(1, options.shapes + 1):
        x, y = torch.randn(shape, 16).to(device), torch.randint(0, 4, (shape,)).to(device)
        optimizer.zero_grad()
        with xla_amp.autocast(device):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        xla_amp.sync()
        if options.evaluate:
            with torch.no_grad(), xla_amp.autocast(device):
                (model(x[: shape // 2 + 1]).argmax(-1) == y[: shape // 2 + 1]).sum().item()
        if shape % options.every == 0 or shape == options.shapes:
            counts = xla_amp.metrics()
            gc.collect()
            executables = len(jax.devices()[0].client.live_executables())
            print(
                f"{shape:6}  {resident():12.0f}  {executables:11}  {counts['program_bytes'] / 2**20:13.0f}  "
                f"{counts['programs_dropped']:7}  {len(graph.instructions):12}  {len(gc.get_objects()):7}  "
                f"{time.monotonic() - begin:7.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
