"""What the risk levels cost, and how far they are from float32.

    python benchmarks/risk_levels.py [--models GPT-2 ViT] [--rounds 10] [--target v5e]

A training step (forward and backward pass, SGD) of small models on the lazy device, one executable, under each level.
Time is this machine's, in turns of one step each, as a share of float32's.  Bytes and peak memory are XLA's own figures
for the step compiled for a TPU, without having one.  Errors are those of the loss and of all gradients as one vector,
relative to the same step in float64 on the CPU.  In the ResNet-50 the last norm of each block begins at zero (Goyal et
al. 2017, section 5.1); without that the gradients of its first step are chaotic: 1e-2 off in float32, 1.3 in bfloat16,
with torch's own autocast too.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any

import torch
from models import Bottleneck
from results import write_json, write_markdown
from workloads import Workload, language, resnet, vit

import xla_amp
from xla_amp.tools.inspect import targets

_SIZE: dict[str, Any] = {"layers": 2, "width": 256, "heads": 4}
MODELS = [
    Workload(name="GPT-2", **language(4, 128, vocabulary=2048, context=128, **_SIZE)),
    Workload(name="BERT", **language(4, 128, "BERT", vocabulary=2048, context=128, **_SIZE)),
    Workload(name="ResNet-50", **resnet(8, 64, width=16, classes=100)),
    Workload(name="ViT", **vit(8, side=64, classes=100, **_SIZE)),
]
LEVELS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "cautious": {"policy": "cautious"},
    "default on GPU": {"policy": "gpu", "dtype": torch.bfloat16},
    "lean": {"policy": "lean"},
}


class Step:
    """A training step of one model at one level; its optimizer changes nothing, so every step is the first."""

    def __init__(self, workload: Workload, level: str, place: Any, dtype: torch.dtype = torch.float32) -> None:
        self.model = workload.torch_model().to(place, dtype)
        for module in self.model.modules():
            if isinstance(module, Bottleneck):
                torch.nn.init.zeros_(module.norm3.weight)
        x, y = workload.torch_batch()
        self.batch = (x.to(place, dtype) if x.is_floating_point() else x.to(place)), y.to(place)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.place, self.region = place, LEVELS[level]

    def __call__(self) -> torch.Tensor:
        region = contextlib.nullcontext() if self.region is None else xla_amp.autocast(self.place, **self.region)
        with region:
            loss: torch.Tensor = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def seconds(self) -> float:
        """The time of one step until its loss is on the host."""
        self.optimizer.zero_grad()
        start = time.perf_counter()
        self().item()
        return time.perf_counter() - start

    def errors(self, exact: tuple[float, torch.Tensor]) -> tuple[float, float]:
        """Relative errors of loss and gradients."""
        loss, gradients = self.values()
        return abs(loss - exact[0]) / abs(exact[0]), float((gradients - exact[1]).norm() / exact[1].norm())

    def values(self) -> tuple[float, torch.Tensor]:
        """Loss, and all gradients as one float64 vector on the CPU."""
        self.optimizer.zero_grad()
        loss = self().item()
        return loss, torch.cat([p.grad.cpu().double().flatten() for p in self.model.parameters() if p.grad is not None])


def compiled(compilers: targets.Compilers, workload: Workload, level: str, target: str) -> Any:
    """XLA's figures for the step on `target`."""
    program = xla_amp.export_for(target, lambda: Step(workload, level, xla_amp.xla_device()))
    return compilers.compile(program, target, program.compiler_options)


HEADINGS = ("model", "level", "time", "GB accessed", "peak MiB", "bytes", "memory", "loss error", "gradient error")


def main() -> None:
    """Measures, prints and writes ``results/risk_levels``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[model.name for model in MODELS])
    parser.add_argument("--rounds", type=int, default=10, help="turns of one step each")
    parser.add_argument("--target", default="v5e", help="the device that bytes and memory are for")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with targets.Compilers() as compilers:
        for workload in (model for model in MODELS if model.name in options.models):
            exact = Step(workload, "float32", torch.device("cpu"), torch.float64).values()
            steps = {level: Step(workload, level, xla_amp.xla_device()) for level in LEVELS}
            errors = {level: step.errors(exact) for level, step in steps.items()}
            for step in steps.values():
                step.seconds()
            times: dict[str, list[float]] = {level: [] for level in LEVELS}
            for _ in range(options.rounds):
                for level, step in steps.items():
                    times[level].append(step.seconds())
            del steps
            for level in LEVELS:
                found = compiled(compilers, workload, level, options.target)
                rows.append(
                    {
                        "model": workload.name, "shape": workload.shape, "level": level,
                        "seconds": statistics.median(times[level]), "bytes": found.bytes_accessed,
                        "peak_memory": found.peak_memory, "loss_error": errors[level][0],
                        "gradient_error": errors[level][1],
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    write_json("risk_levels", {"target": options.target, "rows": rows})
    title = f"Risk levels: a training step; time on this CPU, bytes and memory for a TPU {options.target}"
    write_markdown("risk_levels", HEADINGS, table(rows), title)


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text; ``time``, ``bytes`` and ``memory`` are shares of float32's."""
    base = {row["model"]: row for row in rows if row["level"] == "float32"}

    def share(row: dict[str, Any], key: str) -> str:
        return f"{row[key] / base[row['model']][key]:.2f}"

    return [
        (
            row["model"], row["level"], share(row, "seconds"), f"{row['bytes'] / 1e9:.3f}",
            f"{row['peak_memory'] / 2**20:.1f}", share(row, "bytes"), share(row, "peak_memory"),
            f"{row['loss_error']:.1e}", f"{row['gradient_error']:.1e}",
        )
        for row in rows
    ]  # fmt: skip


if __name__ == "__main__":
    main()
