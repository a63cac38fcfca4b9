"""What to run on a machine with a GPU or a TPU that is at hand for a quarter of an hour: one command, no network.

    scripts/gpu_day.sh --minutes 12                     # goes on where an earlier call with this tree stopped
    scripts/gpu_day.sh --minutes 5 --parts gpt2 head
    python3 scripts/hardware_day.py tpu --minutes 12
    scripts/gpu_day.sh --dry-run                        # the same plan on the CPU, at the smallest sizes

Products with an odd extent are timed first.  Then tests run side by side, for at most a third of the time that is left;
then, one at a time on a quiet machine, what else is timed, in the order of its worth.  Each part is a process with its
own log in build/gpu_day or build/tpu_day.  After each part benchmarks/results/gpu_day.md (or tpu_day.md) is written:
the date, the chip, the versions, counts, failures by cause, and the tables of the races.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import record_tests
from source_tree import FOLDERS, ROOT

TESTS = 0.35
"""The share of the time that is left when they begin, after which tests are stopped."""
RACE, LEAST, GRACE = 200, 30, 15
"""Seconds: of a quiet part, of the shortest part that is begun, and between a part's interrupt and its end."""
FIRST = (125, 55)
"""Seconds of the two parts that a GPU begins with: they decide how products are computed."""
RACES = ("GPT-2", "ResNet-50", "BERT", "ViT")
RESULTS = ROOT / "benchmarks" / "results"
PLATFORMS = {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""Platform -> JAX_PLATFORMS."""
NEEDS = {
    **{name: name for name in ("flatbuffers", "flax", "jax", "optax", "pytest", "rich", "torch", "tqdm")},
    **{"absl": "absl-py", "pytest_timeout": "pytest-timeout", "sklearn": "scikit-learn", "xdist": "pytest-xdist"},
}
"""Module -> the package that brings it."""
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One process."""

    name: str
    shows: str
    command: tuple[str, ...]
    """With {folder}, {programs} and {limit} for what the call knows."""
    quiet: bool = False
    """Whether it is timed, so that nothing runs beside it; before all tests if it is in the plan before them."""
    seconds: float = RACE
    """The most that a quiet part may take."""
    is_test: bool = False
    """Whether it is pytest, which runs with a record (`record_tests`)."""


def plan(platform: str, dry: bool = False) -> list[Part]:
    """The parts for a platform, in order.

    Args:
        platform: "gpu" or "tpu".
        dry: at sizes for a CPU.
    """
    gpu = platform == "gpu"
    # One TPU serves one process.
    pytest = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        *(("-n", "3") if gpu and not dry else ()),
    )

    def tests(name: str, shows: str, path: str, few: str) -> Part:
        marked = ("-m", "gpu or tpu") if path.startswith("tests/gpu") else ()
        command = (*pytest, *marked, few if dry else path)
        return Part(name=name, shows=shows, command=command, is_test=True)

    def mnist(name: str, shows: str, *options: str) -> Part:
        short = ("--epochs", "1") if dry else ()
        return Part(name=name, shows=shows, command=("examples/mnist.py", "--json", *options, *short))

    def steps(name: str, shows: str, workload: str, peers: list[str], start: str, most: float = RACE) -> Part:
        sizes = ("--size", "dry", "--rounds", "1", "--run", "2") if dry else ("--size", "full")
        options = ["--merge", "--no-plot", start, "--kernels", "--limit", "{limit}", "--programs", "{programs}"]
        command = ("benchmarks/step_table.py", "--name", "{folder}/steps", "--workloads", workload, *sizes, *options)
        seconds = 3 * RACE if dry else most  # a machine that tests a change does other work, too
        return Part(name=name, shows=shows, command=(*command, "--peers", *peers), quiet=True, seconds=seconds)

    def race(name: str, workload: str) -> Part:
        peers = ["lazy bf16", "lazy bf16 captured", "torch autocast", "torch.compile autocast", "Flax bf16"]
        peers = [peer for peer in (*peers, "Flax, xla_amp.jax") if gpu or not peer.startswith("torch")]
        if dry:  # each peer once
            peers = peers[RACES.index(workload) :: len(RACES)]
        return steps(name, f"{workload}: table below", workload, peers, "--side-by-side")

    cuda = [tests("cuda", "torch's own CUDA autocast under ours", *["tests/gpu/test_torch_cuda.py"] * 2)]
    fp16 = [
        mnist("mnist-fp16", "the same with a scaler", "--precision", "fp16", "--policy", "gpu"),
        mnist("mnist-fp16-adam", "the same with a sync-free Adam", "--precision", "fp16", "--optimizer", "adam"),
    ]
    head = ("benchmarks/head_products.py", *(("--rows", "64", "--columns", "65", "--width", "16") if dry else ()))
    forms = ("benchmarks/attention_forms.py", *(("--batch", "1", "--tokens", "256", "--rounds", "1") if dry else ()))
    regions = "tests/pytorch/autocast/test_autocast_regions.py::test_the_cache_flag"
    scale = "tests/jax_front/test_loss_scale.py::test_a_static_scale_is_constant"
    options = "tests/training/test_compile_options.py::test_users_replace_and_add"
    ways = ["lazy bf16, plain products", "lazy bf16, no Triton", *(() if dry else ("lazy bf16",))]
    products = "GPT-2, odd products padded, plain, and no Triton at all: table below"
    return [
        *([steps("products", products, "GPT-2", ways, "--at-once", FIRST[0])] if gpu else ()),
        Part(
            name="head",
            shows="ms of a head's products, odd vocabulary, plain and padded",
            command=head,
            quiet=True,
            seconds=FIRST[1],
        ),
        tests("fronts", "every front, captured steps, attention against float64", *["tests/gpu/test_on_a_gpu.py"] * 2),
        *(cuda if gpu else ()),
        mnist("mnist-bf16", "accuracy, 1 executable and 0 syncs a step", "--precision", "bf16"),
        *(fp16 if gpu else ()),
        tests("autocast", "tests of autocast on the device", "tests/pytorch/autocast", regions),
        tests("jax", "tests of the JAX front", "tests/jax_front", scale),
        tests("training", "tests of training", "tests/training", options),
        tests("lowering", "tests of lowerings", "tests/lowering", "tests/lowering/test_registered_names.py"),
        race("gpt2", "GPT-2"),
        race("resnet", "ResNet-50"),
        race("bert", "BERT"),
        race("vit", "ViT"),
        Part(name="attention", shows="ms and memory of each form of attention", command=forms, quiet=True),
    ]


def missing(platform: str, dry: bool) -> list[str]:
    """What the plan needs and this machine lacks, a sentence each."""
    found = [f"Python package {NEEDS[name]}" for name in NEEDS if importlib.util.find_spec(name) is None]
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        found.append("a C compiler (cc or gcc), for torch.compile")
    if not found and not dry:
        chip = machine()
        if chip["platform"] != platform:
            found.append(f"a {platform.upper()}: JAX's device is {chip['chip']!r}")
        if platform == "gpu" and not chip["cuda of torch"]:
            found.append(f"torch with CUDA: {chip['torch']} sees no GPU")
    return found


def machine() -> dict[str, Any]:
    """Chip and versions, asked of another process, which gives the chip back.

    Raises:
        SystemExit: JAX or torch does not start.
    """
    program = (
        "import json, jax, torch, platform; d = jax.devices()[0]; "
        "print(json.dumps({'chip': d.device_kind, 'platform': d.platform, 'jax': jax.__version__, 'torch': "
        "torch.__version__, 'cuda of torch': torch.version.cuda if torch.cuda.is_available() else None, "
        "'python': platform.python_version()}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"hardware_day: JAX and torch do not start here:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def tree() -> str:
    """A digest of the sources: a copy without git has no commit."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Day:
    """One call: its parts, its clock and the results of each part, including those of earlier calls with the same tree.

    Args:
        parts: in order.
        folder: of logs, records and results.
        environment: of the parts.
        seconds: of this call.
        report: is given the results after each part.
    """

    def __init__(
        self, parts: list[Part], folder: Path, environment: Mapping[str, str], seconds: float,
        report: Callable[[Mapping[str, Result]], None],
    ) -> None:  # fmt: skip
        self.parts, self.folder, self.environment, self.report = parts, folder, environment, report
        self.seconds, self._began, self._lock = seconds, time.monotonic(), threading.Lock()
        self._path = folder / "results.json"
        self.results: dict[str, Result] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def left(self) -> float:
        """Seconds until the time is over."""
        return self._began + self.seconds - time.monotonic()

    def run(self, side_by_side: int) -> None:
        """What is quiet and first, tests side by side, what else is quiet; a part that has ended is not run again."""
        left = [part for part in self.parts if self.results.get(part.name, {}).get("status") not in ("ok", "failed")]
        loud = [part for part in left if not part.quiet]
        first = list(itertools.takewhile(lambda part: part.quiet, left)) if loud else []
        self._quiet(first)
        end = time.monotonic() + TESTS * self.left()
        with concurrent.futures.ThreadPoolExecutor(side_by_side) as pool:
            list(pool.map(lambda part: self._part(part, end - time.monotonic()), loud))
        self._quiet([part for part in left if part.quiet and part not in first])

    def _quiet(self, parts: list[Part]) -> None:
        for part in parts:
            self._part(part, min(part.seconds, self.left()) - GRACE)

    def _part(self, part: Part, limit: float) -> None:
        if limit < LEAST:
            print(f"{part.name}: no time left", flush=True)
            return
        print(f"{part.name}: {part.shows}", flush=True)
        result = self.results[part.name] = self._result(part, limit)
        with self._lock:
            self._path.write_text(json.dumps(self.results, indent=1))
            self.report(self.results)
        print(f"{part.name}: {result['status']} after {result['seconds']} s: {result['found']}", flush=True)

    def _result(self, part: Part, limit: float) -> Result:
        log, record = self.folder / f"{part.name}.log", self.folder / f"{part.name}.jsonl"
        known = {"folder": os.path.relpath(self.folder, RESULTS), "limit": f"{limit:.0f}"}
        known["programs"] = str(self.folder.parent / "programs")
        command = [word.format(**known) for word in part.command]
        if part.is_test:
            command += ["-p", "record_tests", "--record", str(record)]
        started = time.monotonic()
        with log.open("w", encoding="utf-8") as output:
            # In a group: what a killed part started ends with it.
            process = subprocess.Popen(
                [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=self.environment,
                process_group=0,
            )  # fmt: skip
            status = None
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        seconds = round(time.monotonic() - started)
        if part.is_test:
            counts = collections.Counter(outcome for outcome, _, _ in record_tests.outcomes(record))
            found = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()) or "no test ended"
            end = "failed" if status == 1 or counts["failed"] else "ok"
            if status not in (0, 1, 5):  # 1: tests failed; 5: all had ended before
                end = "not finished"
            return {"status": end, "seconds": seconds, "found": found, "causes": record_tests.causes(record)}
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        last = lines[-1].rpartition("\r")[2] if lines else ""
        name = {None: "not finished", 0: "ok"}.get(status, "stopped by an error")
        return {"status": name, "seconds": seconds, "found": "" if last.startswith("|") else last[:300]}


def report(parts: list[Part], head: str, results: Mapping[str, Result], tables: list[Path]) -> str:
    """The Markdown of what is known.

    Args:
        parts: all of the platform.
        head: what it was run on, one line.
        results: by part.
        tables: Markdown files to append, those that are there.
    """
    lines = [head, "", "| part | shows | status | s | found |", "|---|---|---|---|---|"]
    for part in parts:
        got = results.get(part.name, {"status": "not run", "seconds": "", "found": ""})
        found = str(got["found"]).replace("|", "\\|")
        lines.append(f"| {part.name} | {part.shows} | {got['status']} | {got['seconds']} | {found} |")
    rows = [
        f"| {name} | {len(tests)} | `{cause.replace('|', chr(92) + '|')}` | `{tests[0]}` |"
        for name, got in results.items()
        for cause, tests in got.get("causes", {}).items()
    ]
    if rows:
        lines += ["", "| part | failures | cause | one of them |", "|---|---|---|---|", *rows]
    return "\n".join([*lines, "", *(path.read_text() for path in tables if path.exists())])


def main() -> int:
    """Runs the parts and writes the table; 1 if a part did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=PLATFORMS)
    parser.add_argument("--minutes", type=float, default=12, help="of this call (default: 12)")
    parser.add_argument(
        "--dry-run", action="store_true", help="on the CPU, at the smallest sizes; prints the table only"
    )
    parser.add_argument("--parts", nargs="+", help="only these; default: all of the platform")
    parser.add_argument("--again", action="store_true", help="also parts that have ended with this tree")
    options = parser.parse_args()
    platform, dry = options.platform, options.dry_run
    environment = {
        **os.environ,
        "COLUMNS": "200",
        "JAX_PLATFORMS": "cpu" if dry else PLATFORMS[platform],
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes, and torch beside JAX, share the chip
    }
    os.environ["JAX_PLATFORMS"] = environment["JAX_PLATFORMS"]
    if dry:
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # a third of the time, which is the compiler's
    parts = plan(platform, dry)
    if unknown := sorted(set(options.parts or ()).difference(part.name for part in parts)):
        parser.error(f"--parts {' '.join(unknown)}: expected some of {', '.join(part.name for part in parts)}")
    if lacks := missing(platform, dry):
        raise SystemExit("hardware_day: this machine lacks, before the clock runs:\n  " + "\n  ".join(lacks))
    folder = ROOT / "build" / f"{platform}_day" / f"{tree()}{'-dry' if dry else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts if part.name in (options.parts or [each.name for each in parts])]
    if options.again:
        for part in chosen:
            (folder / f"{part.name}.jsonl").unlink(missing_ok=True)
    head = f"{time.strftime('%Y-%m-%d')}; {', '.join(f'{name} {value}' for name, value in machine().items())}"
    tables = [folder / "steps.md", folder / "steps_kernels.md"]

    def write(results: Mapping[str, Result]) -> None:
        if not dry:
            (RESULTS / f"{platform}_day.md").write_text(report(parts, head, results, tables))

    day = Day(chosen, folder, environment, 60 * options.minutes, write)
    if options.again:
        for part in chosen:
            day.results.pop(part.name, None)
    day.run(side_by_side=1 if platform == "tpu" else max(2, (os.cpu_count() or 2) // 3))
    print(report(parts, head, day.results, tables))
    return int(any(day.results.get(part.name, {}).get("status") != "ok" for part in chosen))


if __name__ == "__main__":
    raise SystemExit(main())
