"""Time of a training step of five models on the lazy device and its peers, with and without mixed precision.

    python benchmarks/step_table.py                                  # sizes for two cores, every installed peer
    python benchmarks/step_table.py --workloads GPT-2 --peers "lazy bf16" "torch autocast" --rounds 9
    python benchmarks/step_table.py --size tiny --turn 5 --name host   # the host's time, without arithmetic
    python benchmarks/step_table.py --size full                      # published sizes, for one GPU
    python benchmarks/step_table.py --first                          # first steps, without and with programs on disk

Each peer runs in a separate process, in a separate environment if it needs one (docs/benchmarks.md).  Peers alternate,
so that a drift of the machine affects all.  A turn is one step, or `--turn` steps, of which the first is not counted:
it runs with cold caches and with threads of the previous peer that still spin.  Writes medians to
benchmarks/results/steps.{json,md} (and .png), with the date, the machine and the versions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from results import RESULTS, plot, write_json, write_markdown
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"


class Peer(NamedTuple):
    """One way to train a workload."""

    module: str
    """A file in `peers`."""
    option: str
    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = {}


_TORCH_XLA = BUILD / "torch-xla-2.9" / "bin" / "python"
_TORCHAX = BUILD / "torchax" / "bin" / "python"
PEERS = {
    "lazy fp32": Peer("lazy", "fp32"),
    "lazy bf16": Peer("lazy", "bf16"),
    "lazy bf16 captured": Peer("lazy", "captured"),
    "torch fp32": Peer("native", "fp32"),
    "torch autocast": Peer("native", "amp"),
    "torch.compile autocast": Peer("native", "compile"),
    "torch_xla fp32": Peer("torch_xla", "fp32", _TORCH_XLA, {"PJRT_DEVICE": "CPU"}),
    "torch_xla autocast": Peer("torch_xla", "amp", _TORCH_XLA, {"PJRT_DEVICE": "CPU"}),
    "torchax fp32": Peer("torchax", "fp32", _TORCHAX),
    "torchax autocast": Peer("torchax", "amp", _TORCHAX),
    "Flax fp32": Peer("flax", "fp32"),
    "Flax bf16": Peer("flax", "bf16"),
    "Flax, jmp bf16": Peer("flax", "jmp"),
    "Flax, mpx bf16": Peer("flax", "mpx"),
    "Flax, xla_amp.jax": Peer("flax", "autocast"),
}


class _Figure(NamedTuple):
    """A column of the table: a key of a peer's record, and its format."""

    heading: str
    key: str
    text: str
    factor: float = 1.0


FIGURES = (
    _Figure("step ms", "step", "{:.1f}", 1e3),
    _Figure("host ms", "host", "{:.2f}", 1e3),
    _Figure("first steps s", "start", "{:.1f}"),
    _Figure("executables", "executions", "{:g}"),
    _Figure("host syncs", "host_syncs", "{:g}"),
    _Figure("step MiB", "step_bytes", "{:.0f}", 2**-20),
    _Figure("peak MiB", "peak_bytes", "{:.0f}", 2**-20),
)


class Contestant:
    """The process of one peer."""

    def __init__(self, peer: Peer, workload: str, size: str, threads: int) -> None:
        # First steps are cold ones, unless a peer names a folder of programs.
        environment = {
            **os.environ,
            "XLA_AMP_CACHE": "off",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONWARNINGS": "ignore",
        }
        environment |= peer.environment
        environment.pop("PYTHONPATH", None)
        cores = sorted(os.sched_getaffinity(0))[:threads]
        # A pipe that is not read would fill up.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [peer.python, HERE / "peer.py", peer.module, peer.option, workload, size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )

    def ask(self, question: str) -> dict[str, Any]:
        """The answer to "step" or "facts".

        Raises:
            RuntimeError: the process has ended; the message is the last line of its error output.
        """
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101, PT018 - both are pipes
        try:
            print(question, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"exit status {status}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def race(workload: str, names: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Results of each peer on a workload: medians, or ``{"failed": why}``."""
    records: dict[str, dict[str, Any]] = {}
    running: dict[str, Contestant] = {}
    try:
        for name in names:
            if not PEERS[name].python.exists():
                records[name] = {"failed": f"no environment {PEERS[name].python}"}
                continue
            contestant = running[name] = Contestant(PEERS[name], workload, options.size, options.threads)
            try:  # one at a time: compilers use the whole machine
                records[name] = {"start": sum(contestant.ask("step")["step"] for _ in range(3))}
                contestant.ask("step")
            except RuntimeError as error:
                records[name] = {"failed": str(error)[:200]}
                running.pop(name).close()
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in running}
        for _ in range(options.rounds):
            for name, contestant in running.items():
                turn = [contestant.ask("step") for _ in range(options.turn)]
                samples[name] += turn[1:] or turn
        for name, contestant in running.items():
            records[name] |= {
                key: None if samples[name][0][key] is None else statistics.median(s[key] for s in samples[name])
                for key in ("step", "host")
            }
            records[name] |= contestant.ask("facts")
    finally:
        for contestant in running.values():
            contestant.close()
    return records


def first_steps(workload: str, options: argparse.Namespace) -> tuple[str, ...]:
    """A row: seconds of the first step and of the first three, in two processes that share a new folder of programs."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer("lazy", "bf16", environment={"XLA_AMP_CACHE": folder})
        for _ in ("cold", "warm"):
            contestant = Contestant(peer, workload, options.size, options.threads)
            seconds = [contestant.ask("step")["step"] for _ in range(3)]
            found += [seconds[0], sum(seconds)]
            contestant.close()
    cold, cold_all, warm, warm_all = found
    cells = [f"{each:.2f}" for each in (cold, warm, warm / cold, cold_all, warm_all, warm_all / cold_all)]
    return f"{workload}: {WORKLOADS[options.size][workload].shape}", *cells


def rows(results: Mapping[str, Mapping[str, Mapping[str, Any]]], size: str) -> list[tuple[str, ...]]:
    """The table, with each step's time relative to torch's own autocast."""
    lines = []
    for workload, records in results.items():
        base = records.get("torch autocast", {}).get("step")
        for name, record in records.items():
            cells = [
                figure.text.format(figure.factor * record[figure.key]) if record.get(figure.key) is not None else "-"
                for figure in FIGURES
            ]
            ratio = f"{record['step'] / base:.2f}" if base and record.get("step") else "-"
            label = f"{workload}: {WORKLOADS[size][workload].shape}"  # type: ignore[index]
            lines.append((label, name, *cells, ratio, str(record.get("failed", ""))))
    return lines


def main() -> None:
    """Run all peers on all workloads and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=list(WORKLOADS), default="small", help="tiny: the host's time; small: for two cores (default)"
    )
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS["small"]), default=list(WORKLOADS["small"]))
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--turn", type=int, default=1, help="steps of a turn; the first of several is not counted")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="cores that all are pinned to")
    parser.add_argument("--name", default="steps", help="of the files in benchmarks/results")
    parser.add_argument(
        "--merge", action="store_true", help="keep rows of other workloads and peers, although of another run"
    )
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument("--first", action="store_true", help="first steps with and without programs on disk")
    options = parser.parse_args()
    if options.first:
        options.size = "first"
        table = [first_steps(workload, options) for workload in WORKLOADS["first"]]
        headings = ("workload", "first step s", "warm", "ratio", "three steps s", "warm", "ratio")
        write_markdown("first_steps", headings, table, "First steps without programs on disk, and with them (warm).")
        return
    path = RESULTS / f"{options.name}.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if options.merge and path.exists() else {}
    for workload in options.workloads:
        if workload not in WORKLOADS[options.size]:
            continue
        results[workload] = results.get(workload, {}) | race(workload, options.peers, options)
        write_json(options.name, {"size": options.size, "threads": options.threads, "results": results})
    headings = ("workload", "how", *(figure.heading for figure in FIGURES), "/ torch autocast", "")
    write_markdown(options.name, headings, rows(results, options.size), __doc__.splitlines()[0])
    if not options.no_plot:
        panels = {
            workload: {"step": {name: 1e3 * r["step"] for name, r in records.items() if r.get("step")}}
            for workload, records in results.items()
        }
        plot(options.name, panels, "ms per step")


if __name__ == "__main__":
    main()
