"""Process of one peer of `step_table`: trains a workload one step per request.

    python benchmarks/peer.py MODULE OPTION WORKLOAD SIZE

Each line on standard input is a request, each answer a JSON object:

    step       one step, waited for: its seconds until the device is done (`step`) and until the call returns (`host`)
    steps N    N steps, waited for once: seconds of one of them (`run`), and of the host (`run_host`)
    kernels    kernels of a step on a GPU: milliseconds (`kernel_ms`), launches (`kernels`), and both by name (`names`)
    facts      memory and counts
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

PROFILED = 3
"""Steps of a profile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """A training step of one peer."""

    step: Callable[[], Any]
    """Runs one step, possibly asynchronously; its result is passed to `wait`."""
    wait: Callable[[Any], Any]
    """Waits until the device has finished the step."""
    asynchronous: bool = True
    """Whether `step` returns before the device is done, so that its duration is host time."""
    counts: Callable[[], Mapping[str, int]] | None = None
    """Executables run and host syncs since the start, if the peer counts them."""
    memory: Callable[[], int] | None = None
    """Bytes of a step at its peak, what it reads and returns included; the last call of a trainer."""
    peak: Callable[[], int | None] | None = None
    """Most bytes of the device since the start; None, also without this, where the device is the CPU."""
    kernels: Callable[[Callable[[], None]], Iterable[tuple[str, float]]] | None = None
    """Runs a function; name and seconds of each kernel that a GPU ran for it."""


def program_bytes(compiled: Any) -> int:
    """Bytes of a program of JAX by XLA's analysis: arguments, results that are no arguments, and temporaries.

    Args:
        compiled: `jax.stages.Compiled`.
    """
    found = compiled.memory_analysis()
    made = found.output_size_in_bytes - found.alias_size_in_bytes
    total: int = found.argument_size_in_bytes + made + found.temp_size_in_bytes
    return total


def jax_peak() -> int | None:
    """Most bytes of JAX's device; None on the CPU."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def jax_kernels(run: Callable[[], None]) -> Iterable[tuple[str, float]]:
    """Runs `run`; name and seconds of each kernel that JAX's profiler saw on a GPU."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                if "Stream" in line.name:
                    yield from ((event.name, event.duration_ns * 1e-9) for event in line.events)


def _one(trainer: Trainer) -> dict[str, Any]:
    start = time.perf_counter()
    result = trainer.step()
    host = time.perf_counter() - start
    trainer.wait(result)
    return {"step": time.perf_counter() - start, "host": host if trainer.asynchronous else None}


def _run(trainer: Trainer, steps: int) -> dict[str, Any]:
    start = time.perf_counter()
    for _ in range(steps):
        result = trainer.step()
    host = (time.perf_counter() - start) / steps
    trainer.wait(result)
    return {"run": (time.perf_counter() - start) / steps, "run_host": host if trainer.asynchronous else None}


def _kernels(trainer: Trainer) -> dict[str, Any]:
    def run() -> None:
        for _ in range(PROFILED):
            trainer.wait(trainer.step())

    seconds: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    for name, duration in trainer.kernels(run) if trainer.kernels is not None else ():
        seconds[name] += duration
        counts[name] += 1
    if not counts:
        return {}
    names = sorted(((1e3 * s / PROFILED, counts[n] / PROFILED, n) for n, s in seconds.items()), reverse=True)
    return {"kernel_ms": sum(row[0] for row in names), "kernels": counts.total() / PROFILED, "names": names}


def _facts(trainer: Trainer, counted: int, before: Mapping[str, int]) -> dict[str, Any]:
    """Counts are those of a step, since `before`, `counted` steps ago."""
    peak = trainer.peak() if trainer.peak is not None else None
    answer: dict[str, Any] = {"peak_bytes": peak or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if trainer.counts is not None and counted > 0:
        after = trainer.counts()
        answer |= {key: (after[key] - before[key]) / counted for key in after}
    if trainer.memory is not None and not peak:  # it may compile the step again
        answer["step_bytes"] = trainer.memory()
    return answer


def main(arguments: list[str]) -> None:
    """Answer requests until the input ends."""
    module, option, name, size = arguments
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch
    from workloads import WORKLOADS

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    trainer: Trainer = importlib.import_module(f"peers.{module}").make(WORKLOADS[size][name], option)  # type: ignore[index]
    before: Mapping[str, int] = {}
    steps = 0
    for line in sys.stdin:
        request, *number = line.split()
        if request in ("step", "steps") and steps == 3 and trainer.counts is not None:
            before = trainer.counts()
        if request == "step":
            answer = _one(trainer)
            steps += 1
        elif request == "steps":
            answer = _run(trainer, int(number[0]))
            steps += int(number[0])
        elif request == "kernels":
            answer = _kernels(trainer)
            steps += PROFILED if trainer.kernels is not None else 0
        else:
            answer = _facts(trainer, steps - 3, before)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # Peers import `peer`: it must not be loaded a second time.
    sys.modules["peer"] = sys.modules["__main__"]
    main(sys.argv[1:])
