"""What `xla_amp.monitor` costs: executables, host syncs, bytes and FLOPs of a training step with and without it.

Bytes and FLOPs are XLA's own analysis of the compiled programs; the step is float16 with a scaler, captured.

    python benchmarks/monitor_cost.py [--model GPT-2] [--size small] [--json] [--write]

With --write the model's row of results/monitor is replaced.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from results import RESULTS, machine, write_json, write_markdown
from workloads import WORKLOADS

import xla_amp
from xla_amp.lazy.programs import execute


class Trainer:
    """A model with its step, watched by a monitor or not."""

    def __init__(self, workload: Any, monitored: bool) -> None:
        self.device = xla_amp.xla_device()
        self.model = workload.torch_model().to(self.device)
        make = {"adamw": xla_amp.syncfree.AdamW, "sgd": xla_amp.syncfree.SGD}[workload.optimizer]
        self.optimizer = make(self.model.parameters(), lr=1e-4)
        self.scaler = xla_amp.GradScaler(init_scale=1024.0)
        self.batch = [tensor.to(self.device) for tensor in workload.torch_batch()]
        self.step = xla_amp.compile(self._step, strict=True)
        self.monitor = xla_amp.monitor(self.model, self.optimizer, self.scaler) if monitored else None

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        with xla_amp.autocast(self.device, dtype=torch.float16):
            loss = self.model(x, y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def __call__(self) -> None:
        """Runs one step, execution included."""
        if self.monitor is None:
            self.step(*self.batch)
        else:
            with self.monitor.step() as running:
                running.loss = self.step(*self.batch)
        xla_amp.sync(wait=True)


def measured(trainer: Trainer, steps: int) -> dict[str, float]:
    """Counts of one step, and XLA's analysis of the program that ran last; the first steps compile."""
    for _ in range(4):
        trainer()
    before = xla_amp.metrics()
    for _ in range(steps):
        trainer()
    after = xla_amp.metrics()
    counts = {name: (after[name] - before[name]) / steps for name in ("executions", "compilations", "host_syncs")}
    counts["host_syncs"] -= 1  # the wait of this script
    program = max(execute.programs(), key=lambda each: each.used)
    costs = program.lower().compile().cost_analysis()
    return {**counts, "bytes": costs["bytes accessed"], "flops": costs["flops"], "operations": program.operations}


def write(row: dict[str, Any]) -> None:
    """Replaces the row of a model in ``results/monitor``."""
    file = RESULTS / "monitor.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = [each for each in rows if each["model"] != row["model"]] + [row]
    write_json("monitor", {"rows": rows})
    lines = [cells(each) for each in sorted(rows, key=lambda each: str(each["model"]))]
    lines += [
        (model, *["not measured"] * (len(HEADINGS) - 1))
        for model in MODELS
        if model not in {each["model"] for each in rows}
    ]
    write_markdown("monitor", HEADINGS, lines, "What a monitor costs, in shares of the step without it")


MODELS = ("GPT-2", "ResNet-50")
HEADINGS = ("model", "executables a step", "host syncs", "bytes", "FLOPs")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    return (
        f"{row['model']}, {row['shape']}",
        f"{row['executions']:g}",
        f"{row['host_syncs']:g}",
        f"{row['bytes']:+.1%}",
        f"{row['flops']:+.1%}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="GPT-2", help="name of a row of benchmarks/workloads.py")
    parser.add_argument("--size", default="small", choices=("tiny", "small", "full"))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--write", action="store_true", help="replace the model's row in results")
    options = parser.parse_args()
    if options.write and options.size != "small":
        parser.error("--write records a run of the size small")
    workload = WORKLOADS[options.size][options.model]
    rows = {name: measured(Trainer(workload, name == "with"), 3) for name in ("without", "with")}
    base, watched = rows.values()
    more = {name: watched[name] / base[name] - 1 for name in ("bytes", "flops")}
    counts = {name: watched[name] for name in ("executions", "host_syncs")}
    if options.write:
        write({"model": options.model, "shape": workload.shape, **counts, **more})
    if options.json:
        print(json.dumps({"machine": machine(), "model": workload.shape, "rows": rows, "more": more}))
        return
    print(machine())
    print(f"{options.model}: {workload.shape}")
    for name in base:
        print(f"{name:<16}" + "".join(f"{rows[row][name]:>18,.4g}" for row in rows))
    print(" " * 16 + "".join(f"{row:>18}" for row in rows))


if __name__ == "__main__":
    main()
