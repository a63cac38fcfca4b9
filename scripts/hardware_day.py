"""What to run on the day there is a GPU or a TPU: one command, parts of at most eight minutes, no network.

    scripts/gpu_day.sh                        # every part that has not succeeded at this commit
    python3 scripts/hardware_day.py tpu --parts mnist-bf16 attention --again
    python3 scripts/hardware_day.py tpu --dry-run            # each part on the CPU, at the smallest size

A part is a process with its own log in build/gpu_day or build/tpu_day; a part that fails or takes too long does not
stop the next one.  The table benchmarks/results/gpu_day.md or tpu_day.md has the date, the chip, the versions and each
part's last figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from source_tree import ROOT, commit

LIMIT = 480
"""Seconds of a part."""
BUILD = ROOT / "build"
RESULTS = ROOT / "benchmarks" / "results"
PLATFORMS = {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""Platform -> JAX_PLATFORMS."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One process."""

    name: str
    shows: str
    command: tuple[str, ...]
    dry: tuple[str, ...]
    """The command with --dry-run."""
    platforms: tuple[str, ...] = ("gpu", "tpu")


_STEPS = ("benchmarks/step_table.py", "--merge", "--no-plot")
_PEERS = ("--peers", "lazy bf16", "lazy bf16 captured", "Flax bf16", "Flax, xla_amp.jax")
_TORCH = ("torch autocast", "torch.compile autocast")
_TEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")


def _tests(name: str, shows: str, folder: str, dry: str) -> tuple[Part, Part]:
    """A TPU serves one process at a time."""
    return (
        Part(name=name, shows=shows, command=(*_TEST, "-n", "8", folder), dry=(*_TEST, dry), platforms=("gpu",)),
        Part(name=name, shows=shows, command=(*_TEST, folder), dry=(*_TEST, dry), platforms=("tpu",)),
    )


def _mnist(name: str, shows: str, *options: str, platforms: tuple[str, ...] = ("gpu", "tpu")) -> Part:
    command = ("examples/mnist.py", "--json", *options)
    return Part(name=name, shows=shows, command=command, dry=(*command, "--epochs", "1"), platforms=platforms)


def _steps(name: str, shows: str, workload: str) -> tuple[Part, ...]:
    tiny = workload if workload in ("GPT-2", "ResNet-50") else "GPT-2"  # those that have a tiny size
    dry = (*_STEPS, "--size", "tiny", "--rounds", "1", "--workloads", tiny, "--peers", "lazy bf16", "--name")
    full = (*_STEPS, "--size", "full", "--rounds", "7", "--workloads", workload, "--name")
    return tuple(
        Part(
            name=name,
            shows=shows,
            command=(*full, platform, *_PEERS, *(_TORCH if platform == "gpu" else ())),
            dry=(*dry, f"../../build/{platform}_day/steps"),
            platforms=(platform,),
        )
        for platform in PLATFORMS
    )


PARTS = (
    _mnist("mnist-bf16", "accuracy, 1 executable and 0 syncs a step", "--precision", "bf16"),
    _mnist(
        "mnist-bf16-adam",
        "the same with a sync-free Adam",
        *("--precision", "bf16", "--optimizer", "adam"),
        platforms=("tpu",),
    ),
    _mnist(
        "mnist-fp16",
        "the same with a scaler; skipped steps",
        *("--precision", "fp16", "--policy", "gpu"),
        platforms=("gpu",),
    ),
    _mnist(
        "mnist-fp16-adam",
        "the same with a sync-free Adam",
        *("--precision", "fp16", "--optimizer", "adam"),
        platforms=("gpu",),
    ),
    Part(
        name="fronts",
        shows="every front, arrays of torch and JAX, captured steps, overflow, attention against float64",
        command=(*_TEST, "-m", "gpu or tpu", "tests/gpu"),
        dry=(*_TEST, "-m", "gpu or tpu", "tests/gpu"),
    ),
    *_tests("training", "tests of training", "tests/training", "tests/training/test_compile_options.py"),
    *_tests(
        "autocast",
        "tests of autocast on the device",
        "tests/pytorch/autocast",
        "tests/pytorch/autocast/test_autocast_regions.py",
    ),
    *_tests("jax", "tests of the JAX front", "tests/jax_front", "tests/jax_front/test_loss_scale.py"),
    Part(
        name="attention",
        shows="time and memory of each form, 16 x 12 x 1024 x 64, bfloat16, causal",
        command=("benchmarks/attention_forms.py",),
        dry=("benchmarks/attention_forms.py", "--batch", "1", "--tokens", "256", "--rounds", "1"),
    ),
    *_steps("steps-gpt2", "GPT-2 124M at 16 x 1024; an A100 takes 90 ms, compiled", "GPT-2"),
    *_steps("steps-resnet", "ResNet-50 at 256 x 224; an A100 does 2,470 images a second", "ResNet-50"),
    *_steps("steps-bert", "BERT-base", "BERT"),
    *_steps("steps-vit", "ViT-B", "ViT"),
)


def install() -> None:
    """Installs this tree, without its dependencies, into a Python that cannot import it."""
    if importlib.util.find_spec("xla_amp") is None:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", "."]
        subprocess.run(command, cwd=ROOT, check=True)


def machine() -> dict[str, str]:
    """Chip and versions, asked of another process, which gives the GPU back."""
    program = (
        "import json, jax, torch, sys, platform; d = jax.devices()[0]; "
        "print(json.dumps({'chip': d.device_kind, 'platform': d.platform, 'jax': jax.__version__, "
        "'torch': torch.__version__, 'python': platform.python_version()}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"hardware_day: JAX and torch do not start here:\n{done.stderr}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(part: Part, dry: bool, environment: dict[str, str], folder: Path) -> dict[str, Any]:
    """Runs one part, with its log in `folder`; its status, seconds and last line."""
    log = folder / f"{part.name}.log"
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


def run_each(
    parts: list[Part], folder: Path, now: str, environment: dict[str, str], *, dry: bool, again: bool
) -> Iterator[dict[str, dict[str, Any]]]:
    """Runs the parts that have not succeeded at the commit `now`; the results by part, before the first and after each.

    Args:
        parts: in order; one that fails stops no other.
        folder: of logs, and of the results of earlier runs.
        now: the commit.
        environment: of the parts.
        dry: whether they run at the smallest sizes.
        again: also parts that have succeeded.
    """
    path = folder / ("dry.json" if dry else "results.json")
    kept: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    yield kept
    for part in parts:
        before = kept.get(part.name, {})
        if before.get("status") == 0 and before.get("commit") == now and not again:
            continue
        print(f"{part.name}: {part.shows}", flush=True)
        got = kept[part.name] = {**run(part, dry, environment, folder), "commit": now}
        path.write_text(json.dumps(kept, indent=1))
        print(f"  {got['status']} after {got['seconds']} s: {got['last']}", flush=True)
        yield kept


def table(parts: list[Part], found: dict[str, Any], results: dict[str, dict[str, Any]]) -> str:
    """The Markdown of `parts`."""
    head = ", ".join(f"{name} {value}" for name, value in found.items())
    lines = [
        f"{time.strftime('%Y-%m-%d')}; {head}",
        "",
        "| part | shows | status | s | last line |",
        "|---|---|---|---|---|",
    ]
    for part in parts:
        got = results.get(part.name, {"status": "not run", "seconds": "", "last": ""})
        status = "ok" if got["status"] == 0 else got["status"]
        last = str(got["last"])[:300].replace("|", "\\|")
        lines.append(f"| {part.name} | {part.shows} | {status} | {got['seconds']} | `{last}` |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Runs the parts and writes the table; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=PLATFORMS)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at the smallest sizes; writes no table")
    parser.add_argument("--parts", nargs="+", help="only these; default: all of the platform")
    parser.add_argument("--again", action="store_true", help="also parts that have succeeded at this commit")
    options = parser.parse_args()
    name, platform = f"{options.platform}_day", options.platform
    parts = [part for part in PARTS if platform in part.platforms]
    known = [part.name for part in parts]
    if unknown := sorted(set(options.parts or ()).difference(known)):
        parser.error(f"--parts {' '.join(unknown)}: expected some of {', '.join(known)}")
    wanted = options.parts or known
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment["JAX_PLATFORMS"] = "cpu" if options.dry_run else PLATFORMS[platform]
    os.environ["JAX_PLATFORMS"] = environment["JAX_PLATFORMS"]
    install()
    found = machine()
    if not options.dry_run and found["platform"] != platform:
        raise SystemExit(f"{name}: JAX's device is {found['chip']!r}; a {platform.upper()} is needed, or --dry-run")
    chosen = [part for part in parts if part.name in wanted]
    for kept in run_each(chosen, folder, commit(), environment, dry=options.dry_run, again=options.again):
        if not options.dry_run:
            (RESULTS / f"{name}.md").write_text(table(parts, found, kept))
    return int(any(kept[each]["status"] != 0 for each in wanted if each in kept))


if __name__ == "__main__":
    raise SystemExit(main())
