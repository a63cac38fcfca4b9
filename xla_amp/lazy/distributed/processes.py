"""Processes with one device each that run the same program: start, end, rendezvous.

Each process has its own values.  XLA treats an array as replicated on every device, and does not check that; the
program runs under `jax.shard_map`, where an operation sees its device's value and a collective sees all values.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xla_amp import config
from xla_amp.errors import EngineError
from xla_amp.lazy import private_api
from xla_amp.lazy.distributed import consistency
from xla_amp.lazy.distributed.collectives import all_reduce as all_reduce
from xla_amp.lazy.distributed.collectives import collective as collective
from xla_amp.lazy.runtime import execute, mesh

_LONGEST_HEARTBEAT = 100
"""Longest heartbeat timeout in seconds: the default of JAX's coordinator."""

_rendezvous_count = itertools.count()


def join() -> None:
    """Connects this process to the others that ``WORLD_SIZE`` announces; returns when all have come.

    From then on the end of one process ends the others: the coordinator misses its heartbeat and ends them with a
    message that names it, at the latest after the timeout.

    Raises:
        EngineError: a process did not come, or has other settings.
    """
    process = config.process()
    if process is None:
        return
    if private_api.coordinator() is None:
        consistency.meet(process)
        _connect(process)
        atexit.register(_leave)  # runs before JAX's exit handler, which is registered already
    consistency.watch_regions()
    execute.admit, mesh.ended = consistency.compare, consistency.ended


def _connect(process: config.Process) -> None:
    try:
        with private_api.without_preemption_notice():
            jax.distributed.initialize(
                process.coordinator,
                process.world_size,
                process.rank,
                local_device_ids=None if config.platform() == "cpu" else [process.local_rank],
                initialization_timeout=process.timeout,
                # The coordinator checks at intervals: two thirds of the timeout leave it time.
                heartbeat_timeout_seconds=min(_LONGEST_HEARTBEAT, 2 * process.timeout // 3),
                shutdown_timeout_seconds=process.timeout,
            )
    except Exception as error:
        raise EngineError(
            f"process {process.rank} of {process.world_size} ({socket.gethostname()}, pid {os.getpid()}) could not "
            f"meet the others at {process.coordinator} within {process.timeout} s: {error}"
        ) from error


_failed = False


def fail() -> None:
    """Marks this process as failed: at exit it does not wait for the others."""
    global _failed
    _failed = True


def _leave() -> None:
    """Exit handler.  JAX's own waits for the other processes, which may wait for this one in a step."""
    if _failed or getattr(sys, "last_value", None) is not None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def world_size() -> int:
    """Number of processes."""
    process = config.process()
    return 1 if process is None else process.world_size


def ordinal() -> int:
    """Rank of this process, from 0."""
    process = config.process()
    return 0 if process is None else process.rank


def local_ordinal() -> int:
    """Rank of this process on its host, from 0."""
    process = config.process()
    return 0 if process is None else process.local_rank


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Waits for all processes (or `replicas`) at `tag`; returns the payload of each, in order.

    Raises:
        EngineError: a process does not come within the timeout; the message names it.
    """
    process, client = config.process(), private_api.coordinator()
    if process is None or client is None:
        return [payload]
    key = f"xla_amp/{next(_rendezvous_count)}/{tag}"
    client.key_value_set_bytes(f"{key}/{process.rank}", payload)
    return [
        consistency.wait_for(client, process, f"{key}/{rank}", rank, repr(tag), binary=True)
        for rank in replicas or range(process.world_size)
    ]


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """``reduce_fn`` of the data of all processes (pickled)."""
    return reduce_fn([pickle.loads(part) for part in rendezvous(tag, pickle.dumps(data))])
