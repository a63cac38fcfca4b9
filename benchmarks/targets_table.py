"""XLA's estimates of a training step on absent TPUs and GPUs: on the lazy device, and written in Flax.

    python benchmarks/targets_table.py [--models GPT-2 ResNet-50] [--targets v6e h100] [--layers 12]

Nothing is run or measured: bytes, and seconds on TPUs, are XLA's estimates, peak memory is what it allocates.  A step
is forward, backward and update (SGD with momentum for ResNet-50, AdamW for the others), state in place.  Each row is
saved to benchmarks/results/targets.json with its date; saved rows are compiled again only with `--again`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import targets
import torch
from flax_models import step_of
from results import RESULTS, stamp, write_markdown
from workloads import Workload, language, resnet, vit

import xla_amp
from xla_amp.lazy.programs import execute, pjrt
from xla_amp.lowering.attention import cudnn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from other_platform import text_for

MODELS: dict[str, Callable[[argparse.Namespace], Workload]] = {
    "GPT-2": lambda options: Workload(name="GPT-2", **language(4, 1024, layers=options.layers)),
    "GPT-2, batch of 16": lambda options: Workload(name="GPT-2", **language(16, 1024, layers=options.layers)),
    "BERT": lambda options: Workload(name="BERT", **language(8, 512, "BERT", layers=options.layers)),
    "ViT": lambda options: Workload(name="ViT", **vit(64, layers=options.layers)),
    "ResNet-50": lambda options: Workload(name="ResNet-50", **resnet(64, 224)),
    # libtpu 0.0.42 crashes on the whole Flax model for a v6e.
    "ResNet-50, first stage": lambda options: Workload(name="ResNet-50", **resnet(64, 224, blocks=(3,))),
}


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """Inside, the lazy device's programs are neither compiled nor run: their results are zeros."""

    def zeros(program: Any, *given: Any) -> list[jax.Array]:
        return [jnp.zeros(each.shape, each.dtype) for each in program.result_shapes()]

    execute.clear_programs()
    with mock.patch.object(execute, "dispatch", zeros):
        yield
    execute.clear_programs()


def lazy(workload: Workload, target: str, low: torch.dtype | None, rules: Mapping[str, str] | None = None) -> str:
    """The step on the lazy device, with the target's policy, overridden by `rules`; float16 with a scaler."""
    changed = xla_amp.policy.override(rules) if rules else contextlib.nullcontext()
    device, platform = xla_amp.xla_device(), targets.platform_of(target)
    with nothing_runs():
        model = workload.torch_model().to(device)
        if workload.optimizer == "sgd":
            optimizer: Any = xla_amp.syncfree.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        else:
            optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-4)
        batch = [tensor.to(device) for tensor in workload.torch_batch()]
        scaler = xla_amp.GradScaler(enabled=low is torch.float16)
        for _ in range(2):  # the first makes the optimizer's state
            with changed, xla_amp.autocast(device, low or torch.bfloat16, enabled=low is not None, policy=platform):
                loss = model(*batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            loss = loss.detach()
            xla_amp.sync()
        return text_for(platform)


def flax(workload: Workload, target: str, low: bool) -> str:
    """The step in Flax and optax."""
    step, state = step_of(workload, jnp.bfloat16 if low else jnp.float32, abstract=True)
    batch = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in workload.flax_batch()]
    return targets.lower(step, *state, *batch, target=target)


def flax_cudnn(workload: Workload, target: str) -> str:
    """The same with cuDNN's attention; JAX's questions about this machine's GPU are answered as for ours."""
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    with cudnn.traced(), mock.patch.object(jax.nn, "dot_product_attention", attention):
        return flax(workload, target, True)


VARIANTS: dict[str, Callable[[Workload, str], str]] = {
    "lazy bf16": lambda workload, target: lazy(workload, target, torch.bfloat16),
    "Flax bf16": lambda workload, target: flax(workload, target, True),
    "Flax fp32": lambda workload, target: flax(workload, target, False),
    # The policy for TPUs gives batch_norm float32 results, as PyTorch/XLA does; in Flax they have the model's dtype.
    "lazy bf16, batch_norm kept": lambda workload, target: lazy(
        workload, target, torch.bfloat16, {"batch_norm": "keep"}
    ),
    "lazy fp16": lambda workload, target: lazy(workload, target, torch.float16),
    "Flax bf16, cuDNN": flax_cudnn,
    "lazy fp32": lambda workload, target: lazy(workload, target, None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """XLA's estimates of one variant of one model on one target."""

    model: str
    target: str
    variant: str
    seconds: float | None
    unjudged: int
    """Operations without an estimate, which `seconds` leaves out (on TPU the splitting of 64-bit inputs)."""
    bytes_accessed: int | None
    peak_memory: int
    contractions: dict[str, int]
    layers: int
    date: str
    """When it was compiled, UTC."""


def measure(compilers: targets.Compilers, model: str, target: str, variant: str, options: argparse.Namespace) -> Row:
    """Compile one variant; the lazy device's with the engine's compile options."""
    ours = pjrt.compiler_options(targets.platform_of(target)) if variant.startswith("lazy") else None
    compiled = compilers.compile(VARIANTS[variant](MODELS[model](options), target), target, ours)
    # XLA subtracts one second for each operation without an estimate; a step takes far less than one second.
    unjudged = -math.floor(compiled.seconds or 0)
    seconds = compiled.seconds and compiled.seconds + unjudged
    kinds = {" ".join(kinds): count for kinds, count in sorted(compiled.contractions().items())}
    return Row(
        model=model,
        target=target,
        variant=variant,
        seconds=seconds,
        unjudged=unjudged,
        bytes_accessed=compiled.bytes_accessed,
        peak_memory=compiled.peak_memory,
        contractions=kinds,
        layers=_layers(model, options),
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}",
    )


def _layers(model: str, options: argparse.Namespace) -> int:
    """The depth of `model` in `options`; 0 if the model has no such option."""
    return 0 if model.startswith("ResNet-50") else int(options.layers)


HEADINGS = (
    *("model", "target", "variant", "est. ms", "GB accessed", "peak GiB", "time", "bytes", "memory"),
    *("contractions", "compiled"),
)


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text, with each figure's ratio to that of the bf16 Flax model."""
    by = {(row["model"], row["layers"], row["target"], row["variant"]): row for row in rows}
    lines = []
    for row in sorted(
        rows, key=lambda row: (row["model"], row["layers"], targets.NAMES.index(row["target"]), row["variant"])
    ):
        base = by.get((row["model"], row["layers"], row["target"], "Flax bf16"))

        def ratio(name: str, row: dict[str, Any] = row, base: dict[str, Any] | None = base) -> str:
            return f"{row[name] / base[name]:.2f}" if base and row[name] and base[name] else "-"

        lines.append(
            (
                f"{row['model']}, {row['layers']} layers" if row["layers"] else row["model"],
                *(row[name] for name in ("target", "variant")),
                f"{1e3 * row['seconds']:.2f}" if row["seconds"] else "-",
                f"{row['bytes_accessed'] / 1e9:.2f}" if row["bytes_accessed"] else "-",
                f"{row['peak_memory'] / 2**30:.2f}",
                *(ratio(name) for name in ("seconds", "bytes_accessed", "peak_memory")),
                ", ".join(f"{count} x {kinds}" for kinds, count in row["contractions"].items()),
                row["date"],
            )
        )
    return lines


def main() -> None:
    """Compile missing rows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--targets", nargs="*", default=["v5e", "v5p", "v6e", "a100", "h100", "h200"])
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS)[:4])
    parser.add_argument("--layers", type=int, default=12, help="blocks of a transformer")
    parser.add_argument("--again", action="store_true", help="compile rows that are there, too")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no row is started")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # targets are compiled in separate processes
    path, started = RESULTS / "targets.json", time.monotonic()
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    with targets.Compilers() as compilers:
        for model in options.models:
            for target in options.targets:
                for variant in options.variants:
                    if "batch_norm" in variant and not model.startswith("ResNet-50"):
                        continue  # it has none
                    if time.monotonic() - started > options.budget:
                        break
                    key: dict[str, Any] = {
                        "model": model,
                        "target": target,
                        "variant": variant,
                        "layers": _layers(model, options),
                    }
                    have = [row for row in rows if key.items() <= row.items()]
                    if have and not options.again:
                        continue
                    began = time.monotonic()
                    row = dataclasses.asdict(measure(compilers, model, target, variant, options))
                    rows = [each for each in rows if each not in have] + [row]
                    path.write_text(json.dumps({"stamp": stamp(), "rows": rows}, indent=1) + "\n")
                    print(*table([row])[0], f"({time.monotonic() - began:.0f} s)", flush=True)
    write_markdown("targets", HEADINGS, table(rows), __doc__.splitlines()[0])


if __name__ == "__main__":
    main()
