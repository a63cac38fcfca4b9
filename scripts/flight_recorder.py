"""The flight recorder's long run: 2,000 float16 steps, in one of which a rare token overflows one layer.

A small language model trains with `xla_amp.monitor`.  In step 1,500 one element of the batch has a token whose
embedding overflows float16 in the feed-forward layer of the second block.  Afterwards the kept step is replayed in a
process of its own, as a user would, and the script fails unless the step, the layer and the element are named and all
numbers are the same bits.

    python scripts/flight_recorder.py [--steps 2000] [--bad 1500] [--processes 2] [--recorded]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp.diagnose import replay_step

VOCABULARY, RARE, WIDTH, LENGTH, BATCH = 64, 63, 16, 12, 8
ELEMENT = 5


class Block(nn.Module):
    """A causal attention layer of one head and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attn(F.layer_norm(x, (WIDTH,))).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        result: torch.Tensor = x + self.drop(self.down(F.relu(self.up(x))))
        return result


class Model(nn.Module):
    """Embedding, two blocks, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def make(recorded: bool = False) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, scaler and step, for the run and for ``xla-amp replay``."""
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.tokens.weight[RARE] = 1000.0  # it never occurs before the bad step, so its gradient is zero
        model.get_parameter("h.1.up.weight")[7] = 40.0
    model.to(device)
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = xla_amp.GradScaler(init_scale=1024.0, growth_interval=10_000)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with xla_amp.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        if xla_amp.xla_model.xrt_world_size() > 1:
            xla_amp.xla_model.reduce_gradients(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, optimizer, scaler, step if recorded else xla_amp.compile(step)


def make_recorded() -> tuple[Any, Any, Any, Any]:
    """`make` without a captured step."""
    return make(recorded=True)


def train(directory: str, steps: int, bad: int, recorded: bool) -> None:
    """The run of one process; the last one gets the rare token."""
    model, optimizer, scaler, step = make(recorded)
    device = xla_amp.xla_device()
    rank, world = xla_amp.xla_model.get_ordinal(), xla_amp.xla_model.xrt_world_size()
    monitor = xla_amp.monitor(model, optimizer, scaler, directory=directory, save_state=True)
    made = torch.Generator().manual_seed(rank)
    start, before = time.perf_counter(), xla_amp.metrics()
    for index in range(steps):
        x = torch.randint(0, RARE, (BATCH, LENGTH + 1), generator=made)
        if index == bad and rank == world - 1:
            x[ELEMENT, 3] = RARE
        x, y = x[:, :-1].to(device), x[:, 1:].clamp(max=RARE - 1).to(device)
        with monitor.step(x, y) as running:
            running.loss = step(x, y)
    monitor.close()
    after = xla_amp.metrics()
    print(
        f"process {rank}: {steps:,} steps in {time.perf_counter() - start:.0f} s, "
        f"{after['compilations'] - before['compilations']} programs, kept {monitor.bad_step}"
    )


def _process(index: int, *arguments: Any) -> None:
    train(*arguments)


def _replay(index: int, directory: str, name: str) -> None:
    report = replay_step.replay(directory, globals()[name])
    print(f"replay in process {index}: {len(report.differences)} of {report.compared} numbers differ", flush=True)
    if report.differences:
        sys.exit("\n".join(report.differences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--bad", type=int, default=1500, help="the step with the rare token")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--recorded", action="store_true", help="without xla_amp.compile")
    parser.add_argument("--directory", help="where the run is kept; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or temporary
        arguments = (directory, options.steps, options.bad, options.recorded)
        if options.processes > 1:
            xla_amp.launch(_process, args=arguments, nprocs=options.processes)
        else:
            train(*arguments)
        name = "make_recorded" if options.recorded else "make"
        command = [sys.executable, "-m", "xla_amp", "replay", directory, "--make", f"flight_recorder:{name}"]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        found = subprocess.run(
            [*command, "--json"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        if not found.stdout:
            sys.exit(found.stderr)
        report = json.loads(found.stdout)
        place = report["overflow"]["producers"][0]["place"]
        print(
            f"replay: step {report['bad']['step']:,}, process {report['bad']['rank']}, module {place['module']}, batch "
            f"elements {report['elements']}, {len(report['differences'])} of {report['compared']} numbers differ"
        )
        wanted = (options.bad, options.processes - 1, "h.1.up", [ELEMENT])
        if (report["bad"]["step"], report["bad"]["rank"], place["module"], report["elements"]) != wanted:
            sys.exit(f"expected {wanted}")
        if report["differences"]:
            sys.exit("\n".join(report["differences"]))
        if options.processes > 1:
            xla_amp.launch(_replay, args=(directory, name), nprocs=options.processes)


if __name__ == "__main__":
    main()
