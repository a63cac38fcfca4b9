"""Process of one peer of `step_table`: trains a workload one step per request.

    python benchmarks/peer.py MODULE OPTION WORKLOAD SIZE

A line "step" on standard input runs one step; the answer is a JSON object with its seconds (`step`: until the device
is done, `host`: until the call returns).  A line "facts" returns memory use and counts.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


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


def program_bytes(compiled: Any) -> int:
    """Bytes of a program of JAX by XLA's analysis: arguments, results that are no arguments, and temporaries.

    Args:
        compiled: `jax.stages.Compiled`.
    """
    found = compiled.memory_analysis()
    made = found.output_size_in_bytes - found.alias_size_in_bytes
    total: int = found.argument_size_in_bytes + made + found.temp_size_in_bytes
    return total


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
        if line.strip() == "step":
            if trainer.counts is not None and steps == 3:
                before = trainer.counts()
            start = time.perf_counter()
            result = trainer.step()
            host = time.perf_counter() - start
            trainer.wait(result)
            answer: dict[str, Any] = {"step": time.perf_counter() - start}
            answer["host"] = host if trainer.asynchronous else None
            steps += 1
        else:
            answer = {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
            if torch.cuda.is_available():
                answer["peak_bytes"] = torch.cuda.max_memory_allocated() or None
            if trainer.counts is not None and steps > 3:
                after = trainer.counts()
                answer |= {key: (after[key] - before[key]) / (steps - 3) for key in after}
            if trainer.memory is not None:
                answer["step_bytes"] = trainer.memory()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # Peers import `peer`: it must not be loaded a second time.
    sys.modules["peer"] = sys.modules["__main__"]
    main(sys.argv[1:])
