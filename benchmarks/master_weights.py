"""What 16-bit weights need to train as float32's do: loss of a small GPT and bytes, by `master` of `syncfree.AdamW`.

The GPT learns to predict the bytes of the pages in docs/.  A run differs by its seed: of weights, batches and rounding.
Weights are bfloat16, but in the row "float32 weights", which trains float32 weights under autocast.  Bytes of weights
and state are counted; the peak is XLA's, of the whole step, with the batch and activations.

    python benchmarks/master_weights.py [--steps 240] [--seeds 3] [--write]     # --write: the table in docs
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
from typing import Any

import torch
from results import machine
from source_tree import ROOT
from torch import nn
from torch.nn import functional as F

import xla_amp
from xla_amp.lazy.programs import execute

PAGE = ROOT / "docs" / "loss_scaling.md"
MARK = "<!-- figures: python benchmarks/master_weights.py --write -->\n"
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 3, 4, 64, 8
ROWS = {
    "float32 weights": "float32",
    "plain bfloat16": None,
    '`master="fp32"`': "fp32",
    '`master="split16"`': "split16",
    '`master="kahan"`': "kahan",
    '`master="stochastic"`': "stochastic",
}


class GPT(nn.Module):
    """Bytes [rows, LENGTH] to logits [rows, LENGTH, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight
        logits: torch.Tensor = self.head(self.norm(self.layers(x, mask=self.mask.to(x.dtype), is_causal=True)))
        return logits


def run(master: str | None, seed: int, steps: int, text: torch.Tensor) -> dict[str, Any]:
    """Losses of a run, bytes of weights and state, and XLA's peak."""
    device = xla_amp.xla_device()
    if seed == 0:
        execute.clear_programs()  # the largest is this row's then
    torch.manual_seed(seed)
    wide = master == "float32"
    model = GPT().to(device, torch.float32 if wide else torch.bfloat16)
    mode: Any = None if wide else master
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, master=mode)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (0.505 + 0.495 * math.cos(math.pi * step / steps))
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with xla_amp.autocast(device) if wide else contextlib.nullcontext():
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = xla_amp.compile(step)
    batches = torch.Generator().manual_seed(1000 + seed)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=batches)
        losses.append(compiled(text[starts + torch.arange(LENGTH + 1)].to(device)))
        xla_amp.sync()
        cosine.step()
    values = [loss.item() for loss in losses]
    state = [value for each in optimizer.state.values() for value in each.values()]
    memory = max(execute.programs(), key=lambda program: program.operations).lower().compile().memory_analysis()
    return {
        "loss": statistics.mean(values[-steps // 8 :]),
        "weights": sum(each.numel() for each in model.parameters()),
        "bytes": sum(each.numel() * each.itemsize for each in [*model.parameters(), *state]),
        "peak": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
    }


def table(steps: int, seeds: int) -> str:
    """The figures as Markdown; each run is printed as it ends."""
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))))
    rows, base = [], []
    for title, master in ROWS.items():
        runs = [run(master, seed, steps, text) for seed in range(seeds)]
        losses = [each["loss"] for each in runs]
        base = base or losses
        print(f"{title}: {losses}", flush=True)
        differences = [loss - first for loss, first in zip(losses, base, strict=True)]
        per_weight = runs[0]["bytes"] / runs[0]["weights"]
        rows.append(
            f"| {title} | {per_weight:.2f} | {runs[0]['bytes'] / 2**20:.2f} | {runs[0]['peak'] / 2**20:.2f} "
            f"| {statistics.mean(losses):.4f} | {min(differences):+.4f} to {max(differences):+.4f} |\n"
        )
    head = "| | bytes a weight | MiB of weights and state | XLA's peak, MiB | loss | against float32 weights |\n"
    count = f"{runs[0]['weights']:,} weights, {steps} steps, {seeds} seeds; loss: mean of the last {steps // 8} steps"
    return f"A GPT of {count}. {machine()}:\n\n{head}|---|---|---|---|---|---|\n{''.join(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    arguments = parser.parse_args()
    found = table(arguments.steps, arguments.seeds)
    print(found)
    if arguments.write:
        before, mark, after = PAGE.read_text().partition(MARK)
        PAGE.write_text(f"{before}{mark}\n{found}\n{after[after.index('<!-- end -->') :]}")


if __name__ == "__main__":
    main()
