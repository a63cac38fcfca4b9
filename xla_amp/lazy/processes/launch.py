"""`launch`: run a function in several processes of one machine, one device each."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from xla_amp.common import arguments, config
from xla_amp.engines import base
from xla_amp.lazy import processes

GRACE = 5
"""Seconds that the other processes get to exit after one has failed."""


def _run(
    index: int, function: Callable[..., Any], args: tuple[Any, ...], count: int, port: int, timeout: int | None
) -> None:
    config.place_process(rank=index, world_size=count, port=port, timeout=timeout)
    try:
        function(index, *args)
    except BaseException as error:
        processes.fail(error)
        raise


def launch(
    function: Callable[..., Any], nprocs: int, args: tuple[Any, ...] = (), *, timeout: int | None = None
) -> None:
    """Runs ``function(rank, *args)`` in `nprocs` new processes that train together; returns when all have ended.

    Each process has one device, its own values, and the same program; `xla_model.all_reduce` and the other collectives
    connect them.  If one process fails, the others are ended.  On several machines start the script with torchrun
    instead: the variables that it sets are sufficient.

    Args:
        function: importable by name (the processes are spawned, not forked).
        nprocs: number of processes; at most the number of devices on GPU and TPU.
        args: more arguments, picklable.
        timeout: seconds that processes wait for each other; None takes ``XLA_AMP_TIMEOUT``, or 300.

    Raises:
        EngineError: the process uses torch_xla.
        ValueError: `nprocs` is less than 1, or `timeout` less than 3.
        torch.multiprocessing.ProcessRaisedException: `function` raised; the message has the rank and the traceback.
        torch.multiprocessing.ProcessExitedException: a process was killed.
    """
    arguments.require_function("launch(function)", function, "a function of a module, called as function(rank, *args)")
    arguments.require("launch(nprocs=...)", nprocs, int, "the number of processes, 1 or more")
    arguments.require("launch(args=...)", args, (tuple, list), "a tuple such as (batches,)")
    if nprocs < 1:
        raise ValueError(f"launch(nprocs={nprocs!r}): expected at least 1")
    if timeout is not None and (not isinstance(timeout, int) or timeout < config.TIMEOUT_LEAST):
        raise ValueError(f"launch(timeout={timeout!r}): expected whole seconds, at least {config.TIMEOUT_LEAST}")
    base.require_lazy("launch()", "torch_xla.launch")
    from torch import multiprocessing

    given = (function, tuple(args), nprocs, _two_ports(), timeout)
    spawned = multiprocessing.spawn(_run, given, nprocs, join=False)  # type: ignore[attr-defined,no-untyped-call]
    while not spawned.join(grace_period=GRACE):
        pass


def _two_ports() -> int:
    """A free port whose successor is free too; the coordinator uses the second."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
