"""One contestant in a process of its own: trains a workload a step at a time when told to.

    python benchmarks/peer.py MODULE OPTION WORKLOAD SIZE

A line "step" on standard input makes one step; the answer is a JSON object with its seconds (`step`: until the device
is done, `host`: until Python has its hands free).  A line "facts" asks what the process has seen so far.
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
    """What a file in `peers` makes of a workload."""

    step: Callable[[], Any]
    """Does one step, perhaps without waiting for it; what it returns goes to `wait`."""
    wait: Callable[[Any], Any]
    """Waits until the device has done the step."""
    asynchronous: bool = True
    """Whether `step` returns before the work is done, so that its time is the host's."""
    counts: Callable[[], Mapping[str, int]] | None = None
    """Executables run and host syncs since the start, where the peer counts them."""


def main(arguments: list[str]) -> None:
    """Answers until its input ends."""
    module, option, name, size = arguments
    # What libraries print must not get among the answers.
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
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # Peers import `peer`: it must not be there twice.
    sys.modules["peer"] = sys.modules["__main__"]
    main(sys.argv[1:])
