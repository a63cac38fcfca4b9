"""Host time of an AMP training step on the lazy device, compared with native torch on the CPU.

On the lazy device: recording a step (forward in bf16 autocast, scaled backward, scaler step and update, zero_grad) and
computing its cache key, without running the program.  In native torch: the same step at tiny widths, where the
arithmetic is negligible and Python, dispatch and autograd remain.  Both alternate in one process.

    python benchmarks/host_time.py [--rounds 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from models import GPT, GPTConfig, ResNet50
from results import interleaved, machine

import xla_amp
from xla_amp.lazy.programs import execute


def resnet() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]:
    """ResNet-50 at width 4 on images of 32 pixels, SGD with momentum."""
    model = ResNet50(width=4, classes=10)
    return model, (torch.randn(2, 3, 32, 32), torch.randint(10, (2,))), xla_amp.syncfree.SGD


def gpt2() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]:
    """GPT-2's graph (12 layers, dropout 0.1) at width 24 on 8 tokens, AdamW."""
    model = GPT(GPTConfig(vocabulary=64, context=8, width=24, dropout=0.1))
    return model, (torch.randint(64, (2, 8)), torch.randint(64, (2, 8))), xla_amp.syncfree.AdamW


def trainer(make: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """A function that runs one step on `device` and returns its host seconds."""
    torch.manual_seed(0)
    model, batch, make_optimizer = make()
    model.to(device)
    batch = tuple(tensor.to(device) for tensor in batch)
    options = {"momentum": 0.9} if make_optimizer is xla_amp.syncfree.SGD else {}
    optimizer = make_optimizer(model.parameters(), lr=1e-3, **options)
    scaler = xla_amp.GradScaler(device.type)

    def step() -> None:
        with xla_amp.autocast(device, dtype=torch.bfloat16):
            loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    if device.type == "cpu":

        def native() -> float:
            start = time.perf_counter()
            step()
            return time.perf_counter() - start

        return native

    def lazy() -> float:
        execution = 0.0
        original = execute.execute

        def timed(*args: Any) -> Any:
            nonlocal execution
            start = time.perf_counter()
            try:
                return original(*args)
            finally:
                execution += time.perf_counter() - start

        execute.execute = timed
        try:
            start = time.perf_counter()
            step()
            xla_amp.sync()
            elapsed = time.perf_counter() - start
        finally:
            execute.execute = original
        xla_amp.sync(wait=True)
        return elapsed - execution

    return lazy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each contestant")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, make in (("ResNet-50", resnet), ("GPT-2 124M", gpt2)):
        contestants = {
            "native": trainer(make, torch.device("cpu")),
            "lazy": trainer(make, xla_amp.xla_device()),
        }
        for _ in range(4):  # compiles, then settles
            for contestant in contestants.values():
                contestant()
        times = interleaved(contestants, options.rounds)
        results[name] = {**{k: 1e3 * v for k, v in times.items()}, "ratio": times["lazy"] / times["native"]}
    if options.json:
        print(json.dumps({"machine": machine(), "milliseconds": results}))
        return
    print(machine())
    print(f"{'host time of an AMP step':<26}{'native torch':>14}{'lazy device':>14}{'ratio':>8}")
    for name, row in results.items():
        print(f"{name:<26}{row['native']:>11.2f} ms{row['lazy']:>11.2f} ms{row['ratio']:>8.2f}")


if __name__ == "__main__":
    main()
