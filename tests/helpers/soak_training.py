"""Train for long with evaluation, checkpoints and exceptions in between; compare with undisturbed training.

A small model trains in float16 with a loss scaler.  Between its steps there are evaluations, checkpoints that are read
into new objects, calls that raise, and backward passes whose hook raises.  At the end every value must be that of a
run with nothing but the steps, bit for bit.

    python tests/helpers/soak_training.py [--steps 20000] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import random
import resource
import time
from typing import Any

import torch
from interrupt_fuzz import correct_answers

import xla_amp

BATCHES = 16
EVALUATE = 25
"""Steps from one evaluation to the next."""
CHECKPOINT = 100
RAISE = 20


class Training:
    """A model with batch norm and dropout that trains in float16."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.device = device = xla_amp.xla_device()
        self.first = torch.nn.Linear(8, 16)
        self.model = torch.nn.Sequential(
            self.first, torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2),
            torch.nn.Linear(16, 4),
        ).to(device)  # fmt: skip
        self.optimizer = xla_amp.syncfree.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = xla_amp.GradScaler(growth_interval=50)
        self.skipped_before = 0
        self.batches = [(torch.randn(8, 8).to(device), torch.randint(4, (8,)).to(device)) for _ in range(BATCHES)]

    def step(self, number: int) -> None:
        """One training step."""
        x, y = self.batches[number % BATCHES]
        self.optimizer.zero_grad()
        with xla_amp.autocast(self.device, dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def done(self) -> int:
        """Steps done, also those that the scaler skipped."""
        counts = [int(state["step"]) for state in self.optimizer.state.values()]
        return counts[0] + self.skipped() if counts else 0

    def skipped(self) -> int:
        """Steps that the scalers of this training have skipped."""
        return self.skipped_before + int(self.scaler.skipped_steps())

    def evaluate(self) -> int:
        """Correct answers over all batches."""
        return correct_answers(self.model, self.batches)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(), "random": torch.get_device_module(self.device).get_rng_state(),
        }  # fmt: skip

    def reloaded(self) -> Training:
        """New objects with this state, through a file."""
        file = io.BytesIO()
        torch.save(self.state(), file)
        file.seek(0)
        state = torch.load(file)
        other = Training()
        other.model.load_state_dict(state["model"])
        other.optimizer.load_state_dict(state["optimizer"])
        other.scaler.load_state_dict(state["scaler"])
        other.skipped_before = self.skipped()
        torch.get_device_module(self.device).set_rng_state(state["random"].cpu())
        return other

    def values(self) -> dict[str, torch.Tensor]:
        """Every value of the state, on the CPU."""
        state = self.state()
        found = {name: value.cpu() for name, value in state["model"].items()}
        for index, entry in state["optimizer"]["state"].items():
            found |= {f"{index}.{name}": torch.as_tensor(value).cpu() for name, value in entry.items()}
        return found | {"random": state["random"], "scale": torch.tensor(state["scaler"]["scale"])}


def raise_something(training: Training, which: int) -> None:
    """A call that raises, as on the CPU, and changes nothing."""
    weight = training.first.weight
    if which == 0:
        training.first(torch.ones(2, 3, device=training.device))  # a wrong shape
    elif which == 1:
        weight & weight
    elif which == 2:
        weight[torch.tensor([99]).to(training.device)]
    else:
        copy = weight.detach().clone().requires_grad_()
        copy.register_hook(lambda gradient: 1 / 0)
        (copy * 2).sum().backward()


def disturbed(steps: int, seed: int) -> tuple[Training, collections.Counter[str]]:
    """Trains with everything in between; returns the training and what happened how often."""
    chance = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    training, number = Training(), 0
    while number < steps:
        try:
            if number % RAISE == 7:
                raise_something(training, chance.randrange(4))
            if number % EVALUATE == 11:
                training.evaluate()
                counts["evaluations"] += 1
        except (RuntimeError, IndexError, ZeroDivisionError, NotImplementedError):
            counts["exceptions"] += 1
        training.step(number)
        number = training.done()
        if number % CHECKPOINT == CHECKPOINT - 1:
            training = training.reloaded()
            counts["checkpoints"] += 1
    return training, counts


def soak(steps: int, seed: int) -> dict[str, Any]:
    """Both runs; returns counts, the names of different values, seconds, and the growth of memory."""
    expected = Training()
    for number in range(steps):
        expected.step(number)
    values = expected.values()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    training, counts = disturbed(steps, seed)
    found = training.values()
    different = [name for name, value in values.items() if not torch.equal(value, found[name])]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "steps": steps, **counts, "different": different, "seconds": round(time.perf_counter() - start, 1),
        "grown_mib": round(grown, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = soak(options.steps, options.seed)
    print(json.dumps(result), flush=True)
    os._exit(bool(result["different"]))


if __name__ == "__main__":
    main()
