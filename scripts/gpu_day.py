"""What to run on the day there is a GPU: one command, parts of at most eight minutes, no network.

    scripts/gpu_day.sh                        # every part that has not succeeded at this commit
    scripts/gpu_day.sh --parts mnist-bf16 attention --again
    scripts/gpu_day.sh --dry-run              # each part on the CPU, at the smallest size

A part is a process with its own log in build/gpu_day; a part that fails or takes too long does not stop the next one.
The table benchmarks/results/gpu_day.md has the date, the chip, the versions and each part's last figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 480
"""Seconds of a part."""
FOLDER = ROOT / "build" / "gpu_day"
TABLE = ROOT / "benchmarks" / "results" / "gpu_day.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One process."""

    name: str
    shows: str
    command: tuple[str, ...]
    dry: tuple[str, ...]
    """The command with --dry-run."""


_STEPS = ("benchmarks/step_table.py", "--merge", "--no-plot")
_PEERS = (
    *("--peers", "lazy bf16", "lazy bf16 captured", "torch autocast", "torch.compile autocast"),
    *("Flax bf16", "Flax, xla_amp.jax"),
)
_TEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")


def _tests(name: str, shows: str, folder: str, dry: str) -> Part:
    return Part(name=name, shows=shows, command=(*_TEST, "-n", "8", folder), dry=(*_TEST, dry))


def _mnist(name: str, shows: str, *options: str) -> Part:
    command = ("examples/mnist.py", "--json", *options)
    return Part(name=name, shows=shows, command=command, dry=(*command, "--epochs", "1"))


def _steps(name: str, shows: str, workload: str) -> Part:
    tiny = workload if workload in ("GPT-2", "ResNet-50") else "GPT-2"  # those that have a tiny size
    return Part(
        name=name,
        shows=shows,
        command=(*_STEPS, "--size", "full", "--rounds", "7", "--name", "gpu", "--workloads", workload, *_PEERS),
        dry=(
            *_STEPS,
            "--size",
            "tiny",
            "--rounds",
            "1",
            "--name",
            "../../build/gpu_day/steps",
            "--workloads",
            tiny,
            "--peers",
            "lazy bf16",
        ),
    )


PARTS = (
    _mnist("mnist-bf16", "accuracy, 1 executable and 0 syncs a step", "--precision", "bf16"),
    _mnist("mnist-fp16", "the same with a scaler; skipped steps", "--precision", "fp16", "--policy", "gpu"),
    _mnist("mnist-fp16-adam", "the same with a sync-free Adam", "--precision", "fp16", "--optimizer", "adam"),
    Part(
        name="fronts",
        shows="every front, arrays of torch and JAX, captured steps, overflow, attention against float64",
        command=(*_TEST, "-m", "gpu", "tests/gpu"),
        dry=(*_TEST, "-m", "gpu", "tests/gpu"),
    ),
    _tests("training", "tests of training", "tests/training", "tests/training/test_compile_options.py"),
    _tests(
        "autocast",
        "tests of autocast on the device",
        "tests/pytorch/autocast",
        "tests/pytorch/autocast/test_autocast_regions.py",
    ),
    _tests("jax", "tests of the JAX front", "tests/jax_front", "tests/jax_front/test_loss_scale.py"),
    Part(
        name="attention",
        shows="time and memory of each form, 16 x 12 x 1024 x 64, bfloat16, causal",
        command=("benchmarks/attention_forms.py",),
        dry=("benchmarks/attention_forms.py", "--batch", "1", "--tokens", "256", "--rounds", "1"),
    ),
    _steps("steps-gpt2", "GPT-2 124M at 16 x 1024; an A100 takes 90 ms, compiled", "GPT-2"),
    _steps("steps-resnet", "ResNet-50 at 256 x 224; an A100 does 2,470 images a second", "ResNet-50"),
    _steps("steps-bert", "BERT-base", "BERT"),
    _steps("steps-vit", "ViT-B", "ViT"),
)


def machine() -> dict[str, str]:
    """Chip and versions, asked of another process, which gives the GPU back."""
    program = (
        "import json, jax, torch, sys, platform; d = jax.devices()[0]; "
        "print(json.dumps({'chip': d.device_kind, 'platform': d.platform, 'jax': jax.__version__, "
        "'torch': torch.__version__, 'python': platform.python_version()}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"gpu_day: JAX and torch do not start here:\n{done.stderr}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def commit() -> str:
    """The commit of this tree, or "unknown" in a copy without git."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.stdout.strip() or "unknown"


def run(part: Part, dry: bool, environment: dict[str, str]) -> dict[str, Any]:
    """Runs one part; its status, seconds and last line."""
    log = FOLDER / f"{part.name}.log"
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        try:
            status: int | str = subprocess.run(
                [sys.executable, *(part.dry if dry else part.command)],
                stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, timeout=LIMIT, check=False,
                env=environment,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = f"took more than {LIMIT} s"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return {"status": status, "seconds": round(time.monotonic() - started), "last": lines[-1] if lines else ""}


def table(found: dict[str, Any], results: dict[str, dict[str, Any]]) -> str:
    """The Markdown of all parts."""
    head = ", ".join(f"{name} {value}" for name, value in found.items())
    lines = [
        f"{time.strftime('%Y-%m-%d')}; {head}",
        "",
        "| part | shows | status | s | last line |",
        "|---|---|---|---|---|",
    ]
    for part in PARTS:
        got = results.get(part.name, {"status": "not run", "seconds": "", "last": ""})
        status = "ok" if got["status"] == 0 else got["status"]
        last = str(got["last"])[:300].replace("|", "\\|")
        lines.append(f"| {part.name} | {part.shows} | {status} | {got['seconds']} | `{last}` |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Runs the parts and writes the table; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at the smallest sizes; writes no table")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], default=[p.name for p in PARTS])
    parser.add_argument("--again", action="store_true", help="also parts that have succeeded at this commit")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment["JAX_PLATFORMS"] = "cpu" if options.dry_run else "cuda,cpu"
    os.environ["JAX_PLATFORMS"] = environment["JAX_PLATFORMS"]
    found, now = machine(), commit()
    if not options.dry_run and found["platform"] != "gpu":
        raise SystemExit(f"gpu_day: JAX's device is {found['chip']!r}; a GPU is needed, or --dry-run")
    path = FOLDER / ("dry.json" if options.dry_run else "results.json")
    kept: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for part in PARTS:
        before = kept.get(part.name, {})
        done = before.get("status") == 0 and before.get("commit") == now
        if part.name not in options.parts or (done and not options.again):
            continue
        print(f"{part.name}: {part.shows}", flush=True)
        kept[part.name] = {**run(part, options.dry_run, environment), "commit": now}
        path.write_text(json.dumps(kept, indent=1))
        print(
            f"  {kept[part.name]['status']} after {kept[part.name]['seconds']} s: {kept[part.name]['last']}", flush=True
        )
        if not options.dry_run:
            TABLE.write_text(table(found, kept))
    return int(any(kept[name]["status"] != 0 for name in options.parts if name in kept))


if __name__ == "__main__":
    raise SystemExit(main())
