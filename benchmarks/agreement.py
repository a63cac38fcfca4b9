"""What it costs that processes compare programs before they run: steps with and without, in turn, in two processes.

    python benchmarks/agreement.py [--steps 400] [--size 64] [--device-ms 50]

A step waits for its results, and then for `--device-ms`, as for a device that leaves the processor free.  Prints JSON:
the median time of a step of each kind, their ratio, and the median time of the comparison itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time

import torch
from torch import nn

import xla_amp
from xla_amp import xla_model as xm
from xla_amp.lazy.programs import execute


def run(rank: int, arguments: argparse.Namespace) -> None:
    """Times steps of a perceptron whose gradients are reduced; process 0 prints."""
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    size = arguments.size
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(size, size), nn.ReLU()))).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(arguments.batch, size, device=device)
    compared = execute.together
    waits: list[float] = []

    class Timed:
        def __init__(self, program: object) -> None:
            self.inner = compared(program)

        def __enter__(self) -> None:
            start = time.perf_counter()
            self.inner.__enter__()
            waits.append(time.perf_counter() - start)

        def __exit__(self, *error: object) -> None:
            self.inner.__exit__(*error)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        xm.optimizer_step(optimizer)
        xla_amp.sync(wait=True)
        time.sleep(arguments.device_ms / 1e3)
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"compared": [], "not compared": []}
    for number in range(arguments.steps + 10):
        for kind in times:
            execute.together = compared if kind == "compared" else contextlib.nullcontext
            taken = step()
            if number >= 10:
                times[kind].append(taken)
    execute.together = Timed
    for _ in range(arguments.steps):
        step()
    execute.together = compared
    if rank == 0:
        medians = {kind: statistics.median(found) for kind, found in times.items()}
        found = {f"ms a step, {kind}": round(1e3 * median, 3) for kind, median in medians.items()}
        ratio = medians["compared"] / medians["not compared"]
        print(
            json.dumps({**found, "ratio": round(ratio, 4), "us of a comparison": round(1e6 * statistics.median(waits))})
        )


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--size", type=int, default=64, help="width of the layers")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device-ms", type=float, default=50, help="milliseconds that each step waits in the end")
    xla_amp.launch(run, 2, (parser.parse_args(),))


if __name__ == "__main__":
    main()
