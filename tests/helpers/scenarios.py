"""Scenarios: functions that run in several processes at a time and return values as JSON, which a test compares.

A scenario is a function ``(rank, world, *words)`` of a program beside the test.  Its working directory is the folder of
the run, which all processes share.  `run` starts this file, as a copy (`forked`):

    python scenarios.py START FOLDER WORLD PROGRAM SCENARIO...
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Start = Literal["launch", "group", "script"]
"""By `xla_amp.launch`; as torchrun does, in a process group of the backend "xla_amp"; a script, as torchrun does."""


def started(
    program: str | Path,
    *scenarios: str | Path,
    folder: str | Path,
    world: int = 2,
    devices: int | None = None,
    start: Start = "launch",
    copies: bool = True,
    status: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Runs scenarios (functions and their words, as one text each) in `world` processes of `devices` each.

    Without `copies` the processes that `xla_amp.launch` starts are new interpreters.
    """
    import forked

    environment = {"OMP_NUM_THREADS": "1", "XLA_AMP_TIMEOUT": "240", **os.environ}
    if devices is not None:
        count = f" --xla_force_host_platform_device_count={devices}"
        environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + count
    words = (__file__, start, folder, str(world), program, *scenarios)
    return forked.run(*words, copies=copies, status=status, **environment)


def run(program: str | Path, *scenarios: str, folder: str | Path | None = None, **options: Any) -> dict[str, list[Any]]:
    """What each process returned, by scenario."""
    with tempfile.TemporaryDirectory() as made:
        where = Path(folder or made)
        started(program, *scenarios, folder=where, **options)
        world = options.get("world", 2)
        files = {
            name: [where / f"{number}-{rank}.json" for rank in range(world)] for number, name in enumerate(scenarios)
        }
        return {name: [json.loads(path.read_text()) for path in paths] for name, paths in files.items()}


def in_process(rank: int, folder: str, world: int, program: str, scenarios: list[str]) -> None:
    """What one process does."""
    os.chdir(folder)
    sys.path.insert(0, os.path.dirname(program))
    module = importlib.import_module(Path(program).stem)
    for number, scenario in enumerate(scenarios):
        name, *words = scenario.split()
        found = getattr(module, name)(rank, world, *words)
        Path(f"{number}-{rank}.json").write_text(json.dumps(found))


def in_group(rank: int, folder: str, world: int, program: str, scenarios: list[str]) -> None:
    """The same in a process group."""
    import torch.distributed as dist

    dist.init_process_group("xla_amp")
    in_process(rank, folder, world, program, scenarios)
    dist.destroy_process_group()


def in_script(rank: int, folder: str, world: int, program: str, words: list[str]) -> None:
    """A script with its words."""
    sys.argv = [program, *words]
    runpy.run_path(program, run_name="__main__")


def as_torchrun(rank: int, world: int, port: int, body: Callable[..., None], *arguments: Any) -> None:
    """Sets torchrun's variables first."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    body(rank, *arguments)


def fork(world: int, body: Callable[..., None], *arguments: Any) -> int:
    """Forks processes, which is cheap while nothing of XLA has started; 1 if one failed."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]
        second.bind(("127.0.0.1", port + 1))  # the coordinator's
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=as_torchrun, args=(rank, world, port, body, *arguments)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


def main() -> int:
    """Starts the processes."""
    start, folder, count, program, *scenarios = sys.argv[1:]
    world = int(count)
    arguments = folder, world, program, scenarios
    if start in ("group", "script"):
        return fork(world, in_group if start == "group" else in_script, *arguments)
    if world == 1:
        in_process(0, *arguments)
    else:
        import xla_amp

        xla_amp.launch(in_process, world, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
