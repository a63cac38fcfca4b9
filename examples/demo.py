"""What mixed precision gives on this machine, in about a minute: a small GPT in float32 and in bfloat16.

    python examples/demo.py
    python examples/demo.py --steps 40 --json

The model learns to predict characters of the documentation of Python's standard library.  Both runs start from the same
weights and see the same batches.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter

import common
import jax
import torch
import torch.nn.functional as F
from absl import app, flags
from torch import Tensor, nn
from tqdm import tqdm

import xla_amp
from xla_amp import autocast, explain, syncfree, xla_device
from xla_amp.hardware import processor

STEPS = flags.DEFINE_integer("steps", 12, "steps in each precision; the first two are not timed", lower_bound=4)
WIDTH = flags.DEFINE_integer("width", 512, "features of the model, a multiple of 64", lower_bound=64)
JSON = flags.DEFINE_bool("json", False, "print the results as one JSON object on the last line")

BATCH, CONTEXT, LAYERS, WARM_UP = 8, 128, 4, 2
NEXT = {
    "examples/mnist.py --precision fp16 --policy gpu": "a ConvNet with a GradScaler, one executable a step",
    "examples/gpt.py": "a GPT with evaluation and text that it writes",
    "-m xla_amp doctor": "what this machine has, and what does not fit together",
}


class Block(nn.Module):
    """Attention and a feed-forward part: (batch, time, width) -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        query, key, value = self.attend(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(found.transpose(1, 2).flatten(2))
        result: Tensor = x + self.feed(self.norm2(x))
        return result


class CharacterGPT(nn.Module):
    """Characters (batch, time) int64 -> logits (batch, time, 256)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """The logits of the next character at each place."""
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Training:
    """One run: a model, its optimizer, and what its steps cost."""

    def __init__(self, low: bool) -> None:
        torch.manual_seed(0)
        self.device, self.low = xla_device(), low
        self.model = CharacterGPT(WIDTH.value).to(self.device)
        self.optimizer = syncfree.AdamW(self.model.parameters(), lr=1e-3)
        self.captured = xla_amp.compile(self.train)  # records the first steps, then runs their program
        self.times: list[float] = []
        """Seconds of each step."""
        self.loss = math.nan
        self.ran_low: Counter[str] = Counter()

    def train(self, batch: Tensor) -> Tensor:
        """One training step on characters (batch, time + 1); its loss."""
        self.optimizer.zero_grad()
        with autocast(self.device, dtype=torch.bfloat16, enabled=self.low):
            loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss

    def step(self, characters: Tensor) -> None:
        """The same, timed."""
        started = time.perf_counter()
        explained = explain() if self.low and not self.times else contextlib.nullcontext()
        with explained as report:
            loss = self.captured(characters.to(self.device))
        self.loss = loss.item()  # the only read: the step is one program
        self.times.append(time.perf_counter() - started)
        if report is not None:
            self.ran_low.update(record.operation for record in report.records if record.cast == "low")


def expectation() -> str:
    """What bfloat16 can give on this machine, before anything runs."""
    platform = jax.default_backend()
    if platform != "cpu":
        return f"JAX's device is a {platform}: expect bfloat16 to be faster."
    found = processor()
    if found.multiplies_bfloat16:
        return f"This CPU multiplies bfloat16 ({', '.join(found.features)}): expect bfloat16 to be faster."
    return (
        f"This CPU ({found.name}) does not multiply bfloat16, so float32 is the faster one here, and "
        "torch.autocast('cpu') would not change that. What this library gives you here: a step as one executable, and "
        "a rehearsal of the rules for TPUs and GPUs."
    )


def main(argv: list[str]) -> None:
    """Trains twice and compares."""
    if WIDTH.value % 64:
        raise app.UsageError(f"--width={WIDTH.value}: expected a multiple of 64, the features of an attention head")
    print(expectation())
    text = torch.tensor(list(common.documentation()))
    print(f"Training {STEPS.value} steps in float32 and in bfloat16, in turn; the first step of each compiles.")
    wide, low = Training(low=False), Training(low=True)
    for _ in tqdm(range(STEPS.value)):
        places = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([text[place : place + CONTEXT + 1] for place in places])
        wide.step(batch)
        low.step(batch)
    seconds = {name: statistics.median(run.times[WARM_UP:]) for name, run in (("float32", wide), ("bfloat16", low))}
    results = {
        "float32_milliseconds_per_step": 1e3 * seconds["float32"],
        "bfloat16_milliseconds_per_step": 1e3 * seconds["bfloat16"],
        "bfloat16_to_float32": seconds["bfloat16"] / seconds["float32"],
        "float32_loss": wide.loss,
        "bfloat16_loss": low.loss,
        "executables_per_step": xla_amp.metrics()["executions"] / (2 * STEPS.value),
        "ran_in_bfloat16": ", ".join(f"{name} ({number})" for name, number in sorted(low.ran_low.items())),
    }
    common.show("A step of a small GPT", results, JSON.value)
    print("Next:")
    for command, what in NEXT.items():
        print(f"  python {command}\n      {what}")


if __name__ == "__main__":
    common.run(main)
