"""`launch`: the processes of one machine, one per device, each running the same function."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from xla_amp import config

GRACE = 5
"""Seconds that the others have for ending by themselves when one has failed."""


def _run(index: int, function: Callable[..., Any], args: tuple[Any, ...], count: int, port: int) -> None:
    config.place_process(rank=index, world_size=count, port=port)
    function(index, *args)


def launch(function: Callable[..., Any], nprocs: int, args: tuple[Any, ...] = ()) -> None:
    """Runs ``function(rank, *args)`` in `nprocs` new processes of this machine that train together, to the end.

    Each has one device, its own values, and the same program; `xla_model.all_reduce` and the like reach across.  Where
    one process fails, the others are ended.  On several machines start the script with torchrun instead: the
    variables that it sets are all that is needed.

    Args:
        function: importable by name (the processes are spawned, not forked).
        nprocs: how many; at most the number of devices on GPU and TPU.
        args: more arguments, picklable.

    Raises:
        ValueError: `nprocs` is less than 1.
        torch.multiprocessing.ProcessRaisedException: `function` raised; the message has the rank and the traceback.
        torch.multiprocessing.ProcessExitedException: a process was killed.
    """
    if nprocs < 1:
        raise ValueError(f"launch(nprocs={nprocs!r}): expected at least 1")
    from torch import multiprocessing

    with socket.socket() as probe:  # a free port; the coordinator takes the next one
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = multiprocessing.spawn(_run, (function, args, nprocs, port), nprocs, join=False)
    while not processes.join(grace_period=GRACE):
        pass
