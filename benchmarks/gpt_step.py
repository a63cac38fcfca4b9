"""Step time of a small GPT in fp32 and bf16: lazy device and native torch on this CPU.

Batch 4, 256 tokens, width 768, 2 layers, vocabulary 8192, AdamW.

    python benchmarks/gpt_step.py [--rounds 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from models import GPT, GPTConfig
from timing import interleaved, machine

import xla_amp


def trainer(device: torch.device, low: bool) -> Callable[[], float]:
    """A function that runs one step on `device` and returns its seconds, execution included."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=8192, context=256, layers=2)).to(device)
    tokens, targets = (torch.randint(8192, (4, 256)).to(device) for _ in range(2))
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        start = time.perf_counter()
        with xla_amp.autocast(device, dtype=torch.bfloat16, enabled=low):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type != "cpu":
            xla_amp.sync(wait=True)
        return time.perf_counter() - start

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each contestant")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    lazy, native = xla_amp.xla_device(), torch.device("cpu")
    contestants = {
        "lazy fp32": trainer(lazy, False),
        "lazy bf16": trainer(lazy, True),
        "torch fp32": trainer(native, False),
        "torch bf16": trainer(native, True),
    }
    for _ in range(3):
        for contestant in contestants.values():
            contestant()
    times = interleaved(contestants, options.rounds)
    ratios = {
        "lazy bf16 / lazy fp32": times["lazy bf16"] / times["lazy fp32"],
        "lazy bf16 / torch bf16": times["lazy bf16"] / times["torch bf16"],
        "lazy fp32 / torch fp32": times["lazy fp32"] / times["torch fp32"],
    }
    if options.json:
        print(json.dumps({"machine": machine(), "seconds": times, "ratios": ratios}))
        return
    print(machine())
    for name, seconds in times.items():
        print(f"{name:<26}{seconds:>10.3f} s")
    for name, ratio in ratios.items():
        print(f"{name:<26}{ratio:>10.2f}")


if __name__ == "__main__":
    main()
