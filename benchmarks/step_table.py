"""Time of a training step of five models on the lazy device and its peers, with and without mixed precision.

    python benchmarks/step_table.py                                  # sizes for two cores, every installed peer
    python benchmarks/step_table.py --workloads GPT-2 --peers "lazy bf16" "torch autocast" --rounds 9
    python benchmarks/step_table.py --size tiny --turn 5 --name host   # the host's time, without arithmetic
    python benchmarks/step_table.py --size full                      # published sizes, for one GPU
    python benchmarks/step_table.py --first                          # first steps, without and with programs on disk

Each peer runs in a separate process, in a separate environment if it needs one (docs/benchmarks.md).  Peers alternate,
so that a drift of the machine affects all.  A turn is one step, or `--turn` steps, of which the first is not counted:
it runs with cold caches and with threads of the previous peer that still spin.  Each of these steps is waited for; in
the first three turns then comes a run of `--run` steps that is waited for once, as in training: a step's share of it is
the throughput.  Writes medians to benchmarks/results/steps.{json,md} (and .png), with the date, the machine and the
versions.

On a GPU, `--side-by-side --programs FOLDER --kernels --limit 200` starts torch's compilers beside XLA's, keeps programs
on disk and starts each peer once more with them, lists the kernels of a step, and ends after about 200 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from results import RESULTS, plot, write_json, write_markdown
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
RUNS = 3
"""Turns that have a run of steps, too."""
NAMED = 12
"""Kernels of a peer in the table."""
START, TURNS = 0.6, 0.8
"""Of a limit: the share after which a peer that has not started is left out, and after which no turn begins."""


class Peer(NamedTuple):
    """One way to train a workload."""

    module: str
    """A file in `peers`."""
    option: str
    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = {}

    def with_programs(self, folder: Path) -> Peer:
        """The same, with its compiler's programs on disk; captured steps run those of recorded ones."""
        own = folder / f"{self.module}-{'bf16' if self.option == 'captured' else self.option}"
        names = ("XLA_AMP_CACHE", "JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        return self._replace(environment={**self.environment, **dict.fromkeys(names, str(own))})


_TORCH_XLA = BUILD / "torch-xla-2.9" / "bin" / "python"
_TORCHAX = BUILD / "torchax" / "bin" / "python"
PEERS = {
    "lazy fp32": Peer("lazy", "fp32"),
    "lazy bf16": Peer("lazy", "bf16"),
    "lazy bf16 captured": Peer("lazy", "captured"),
    "lazy bf16, plain products": Peer("lazy", "plain"),
    "lazy bf16, no Triton": Peer(
        "lazy", "no-triton", environment={"XLA_AMP_COMPILER_OPTIONS": "xla_gpu_enable_triton_gemm=False"}
    ),
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


OF_GPUS = ("lazy bf16, plain products", "lazy bf16, no Triton")
"""Peers that differ from "lazy bf16" on a GPU only, where a product has an odd extent, or any."""


class _Figure(NamedTuple):
    """A column of the table: a key of a peer's record, and its format."""

    heading: str
    key: str
    text: str
    factor: float = 1.0


FIGURES = (
    _Figure("throughput ms", "run", "{:.1f}", 1e3),
    _Figure("its host ms", "run_host", "{:.2f}", 1e3),
    _Figure("waited step ms", "step", "{:.1f}", 1e3),
    _Figure("its host ms", "host", "{:.2f}", 1e3),
    _Figure("first step s", "cold", "{:.1f}"),
    _Figure("with programs s", "warm", "{:.1f}"),
    _Figure("first steps s", "start", "{:.1f}"),
    _Figure("kernels ms", "kernel_ms", "{:.1f}"),
    _Figure("kernels", "kernels", "{:.0f}"),
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
        environment["PYTHONPATH"] = str(HERE.parent)  # the tree that is measured
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
        """The answer to a request (`peer`).

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

    def kill(self) -> None:
        """End the process; a request that waits for it fails."""
        self._process.kill()

    def close(self) -> None:
        """End the process, and forget it."""
        self.kill()
        self._process.communicate()
        self._errors.close()


class Race:
    """The peers of one workload: their processes and their measurements."""

    def __init__(self, workload: str, options: argparse.Namespace) -> None:
        self.workload, self.options = workload, options
        self.records: dict[str, dict[str, Any]] = {name: {} for name in options.peers}
        self.running: dict[str, Contestant] = {}
        self._began = time.monotonic()

    def over(self, share: float) -> bool:
        """Whether this share of the limit has passed."""
        return time.monotonic() - self._began > share * self.options.limit

    def _peer(self, name: str) -> Peer:
        options = self.options
        if options.programs is None:
            return PEERS[name]
        return PEERS[name].with_programs(options.programs / options.size / self.workload)

    def contestant(self, name: str) -> Contestant:
        """A new process of a peer."""
        return Contestant(self._peer(name), self.workload, self.options.size, self.options.threads)

    def start(self, names: Iterable[str]) -> None:
        """First steps of peers, one after another: a compiler uses the whole machine, or half of it."""
        for name in names:
            record, peer = self.records[name], self._peer(name)
            late = f"not started within {START * self.options.limit:.0f} s"
            if not peer.python.exists():
                record["failed"] = f"no environment {peer.python}"
            elif self.over(START):
                record |= {"failed": late, "late": True}
            else:
                with_programs = Path(peer.environment.get("XLA_AMP_CACHE", os.devnull)).is_dir()
                contestant = self.running[name] = self.contestant(name)
                stop = threading.Timer(min(self._left(START), threading.TIMEOUT_MAX), contestant.kill)
                stop.start()
                try:
                    seconds = [contestant.ask("step")["step"] for _ in range(3)]
                    record |= {"warm" if with_programs else "cold": seconds[0], "start": sum(seconds)}
                    contestant.ask("step")
                except RuntimeError as error:
                    record |= {"failed": late, "late": True} if self.over(START) else {"failed": str(error)[:200]}
                    self.running.pop(name).close()
                finally:
                    stop.cancel()

    def _left(self, share: float) -> float:
        return self._began + share * self.options.limit - time.monotonic()

    def start_all(self) -> None:
        """All peers, torch's own beside the others with `--side-by-side`, each beside the others with `--at-once`."""
        names, options = list(self.records), self.options
        groups: dict[Any, list[str]] = {}
        for name in names:
            beside = options.side_by_side and PEERS[name].module == "native"
            groups.setdefault(name if options.at_once else beside, []).append(name)
        threads = [threading.Thread(target=self.start, args=(group,)) for group in groups.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.running = {name: self.running[name] for name in names if name in self.running}

    def turns(self) -> None:
        """Peers take turns; medians of the steps and of the runs."""
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in self.running}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in self.running}
        for number in range(self.options.rounds):
            if number and self.over(TURNS):
                break
            for name, contestant in self.running.items():
                turn = [contestant.ask("step") for _ in range(self.options.turn)]
                samples[name] += turn[1:] or turn
                if number < RUNS and self.options.run:
                    runs[name].append(contestant.ask(f"steps {self.options.run}"))
        for name, record in self.records.items():
            for found in (samples.get(name), runs.get(name)):
                record |= {key: _median(each[key] for each in found) for key in found[0]} if found else {}

    def facts(self) -> None:
        """Memory and counts of each peer, and its kernels; then its process ends."""
        for name, contestant in self.running.items():
            try:
                self.records[name] |= contestant.ask("kernels") if self.options.kernels else {}
                self.records[name] |= contestant.ask("facts")
            except RuntimeError as error:
                self.records[name]["failed"] = f"after its turns: {str(error)[:180]}"
            contestant.close()

    def start_again(self) -> None:
        """First steps with the programs that the first start left on disk, if it did."""
        if self.options.programs is None:
            return
        for name in self.running:
            if "warm" in self.records[name] or self.over(1):
                continue
            contestant = self.contestant(name)
            try:
                self.records[name]["warm"] = contestant.ask("step")["step"]
            except RuntimeError as error:
                self.records[name]["failed"] = f"second start: {str(error)[:180]}"
            finally:
                contestant.close()


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def race(workload: str, options: argparse.Namespace, save: Callable[[Mapping[str, Any]], None]) -> None:
    """Gives `save` the results of each peer on a workload, medians or ``{"failed": why}``, whenever there are more."""
    found = Race(workload, options)
    try:
        for phase in (found.start_all, found.turns, found.facts, found.start_again):
            phase()
            save(found.records)
    finally:
        for contestant in found.running.values():
            contestant.close()


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
    """The table, with each step's throughput relative to torch's own autocast."""
    lines = []
    for workload, records in results.items():
        base = records.get("torch autocast", {}).get("run")
        for name, record in records.items():
            cells = [
                figure.text.format(figure.factor * record[figure.key]) if record.get(figure.key) is not None else "-"
                for figure in FIGURES
            ]
            ratio = f"{record['run'] / base:.2f}" if base and record.get("run") else "-"
            label = f"{workload}: {WORKLOADS[size][workload].shape}"  # type: ignore[index]
            lines.append((label, name, *cells, ratio, str(record.get("failed", ""))))
    return lines


def kernel_rows(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """The kernels of a step that take longest, of each peer that named them."""
    return [
        (workload, name, f"{milliseconds:.2f}", f"{count:g}", f"`{kernel[:80]}`")
        for workload, records in results.items()
        for name, record in records.items()
        for milliseconds, count, kernel in record.get("names", ())[:NAMED]
    ]


def bars(records: Mapping[str, Any]) -> dict[str, dict[float | str, float]]:
    """Milliseconds of a step by its name, ours apart from the others."""
    found: dict[str, dict[float | str, float]] = {"xla_amp": {}, "others": {}}
    for name, record in records.items():
        if record.get("step"):
            ours = name.startswith("lazy") or "xla_amp" in name
            found["xla_amp" if ours else "others"][name] = 1e3 * record["step"]
    return found


def main() -> None:
    """Run all peers on all workloads and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size",
        choices=list(WORKLOADS),
        default="small",
        help="dry: does it work; tiny: the host's time; small: for two cores (default)",
    )
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS["small"]), default=list(WORKLOADS["small"]))
    parser.add_argument(
        "--peers", nargs="*", choices=list(PEERS), default=[name for name in PEERS if name not in OF_GPUS]
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--turn", type=int, default=1, help="steps of a turn; the first of several is not counted")
    parser.add_argument("--run", type=int, default=20, help="steps that are waited for once, in the first three turns")
    parser.add_argument("--side-by-side", action="store_true", help="torch's peers start beside the others")
    parser.add_argument("--at-once", action="store_true", help="all peers start beside each other")
    parser.add_argument("--programs", type=Path, help="folder of programs; each peer starts a second time with them")
    parser.add_argument("--kernels", action="store_true", help="also those of a step, on a GPU")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds of a workload, about")
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
        kept = results.get(workload, {})

        def save(records: Mapping[str, Any], workload: str = workload, kept: Mapping[str, Any] = kept) -> None:
            results[workload] = {**kept, **records}
            write_json(options.name, {"size": options.size, "threads": options.threads, "results": results})

        race(workload, options, save)
    headings = ("workload", "how", *(figure.heading for figure in FIGURES), "/ torch autocast", "")
    write_markdown(options.name, headings, rows(results, options.size), __doc__.splitlines()[0])
    if options.kernels:
        titles = ("workload", "how", "ms", "launches", "kernel")
        write_markdown(f"{options.name}_kernels", titles, kernel_rows(results), "The longest kernels of a step.")
    if not options.no_plot:
        plot(options.name, {workload: bars(records) for workload, records in results.items()}, "ms per step")
    late = [name for each in options.workloads for name, r in results.get(each, {}).items() if r.get("late")]
    if late:
        raise SystemExit(f"not started in time: {', '.join(late)}")


if __name__ == "__main__":
    main()
