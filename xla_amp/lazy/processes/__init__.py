"""Processes with one device each that run the same program: start, end, rendezvous.

Each process has its own values.  XLA treats an array as replicated on every device, and does not check that; the
program runs under `jax.shard_map`, where an operation sees its device's value and a collective sees all values.
"""

from __future__ import annotations

import atexit
import collections
import json
import logging
import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence

import jax

from xla_amp.common import config
from xla_amp.errors import EngineError
from xla_amp.lazy.base import private_api
from xla_amp.lazy.processes import cluster, consistency
from xla_amp.lazy.processes.cluster import ordinal as ordinal
from xla_amp.lazy.processes.cluster import world_size as world_size
from xla_amp.lazy.processes.collectives import collective as collective

_HEARTBEAT = 100
"""Seconds, at most, after which JAX's coordinator takes a silent process for dead: JAX's default."""

_IMPORTED_BY = os.getpid()
_rendezvous_counts: collections.Counter[str] = collections.Counter()


def join() -> None:
    """Connects this process to the others of its job (`cluster.place`); returns when all have come.

    From then on JAX's coordinator ends all processes when one of them has gone.

    Raises:
        EngineError: a process did not come, or has other settings.
    """
    process = cluster.place()
    if process is None:
        return
    if private_api.coordinator() is None:
        if cluster.is_loopback(process.host):
            private_api.keep_collectives_local()
        consistency.meet(process)
        _connect(process)
    if process.store is None:
        mine = json.dumps(consistency.settings(process)).encode()
        consistency.compare_settings(process, rendezvous("the start of the device", mine))
    if multiprocessing.parent_process() is not None and os.getpid() != _IMPORTED_BY:
        # A child that `multiprocessing` forks has lost its parent's handlers since Python 3.13 (before, it runs none).
        atexit.register(private_api.exit_function())
    atexit.register(_leave)  # runs before JAX's exit handler


def _connect(process: config.Process) -> None:
    try:
        with private_api.without_preemption_notice():
            jax.distributed.initialize(
                process.coordinator,
                process.world_size,
                process.rank,
                coordinator_bind_address=process.coordinator if cluster.is_loopback(process.host) else None,
                local_device_ids=None if config.platform() == "cpu" else [process.local_rank],
                initialization_timeout=process.timeout,
                heartbeat_timeout_seconds=min(process.timeout, _HEARTBEAT),
                shutdown_timeout_seconds=process.timeout,
            )
    except Exception as error:
        raise EngineError(
            f"process {process.rank} of {process.world_size} ({socket.gethostname()}, pid {os.getpid()}) could not "
            f"meet the others at {process.coordinator} within {process.timeout} s: {error}"
        ) from error


_failure: BaseException | None = None


def fail(error: BaseException) -> None:
    """Marks this process as failed: at exit it does not wait for the others."""
    global _failure
    _failure = error


def _leave() -> None:
    """Exit handler.  JAX's own would wait for the other processes, which may wait in a program for one that failed."""
    process, failure = cluster.place(), _failure or getattr(sys, "last_value", None)
    assert process is not None  # noqa: S101  (`join`)
    reason = "has ended" if failure is None else f"has failed ({type(failure).__name__}: {failure})"
    consistency.leave(process, reason)
    if failure is not None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def local_ordinal() -> int:
    """Rank of this process on its host, from 0."""
    process = cluster.place()
    if process is None:
        return 0
    found = consistency.rank_on_host(process.rank) if config.local_rank() is None else None
    return process.local_rank if found is None else found


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Waits for all processes (or `replicas`) at `tag`; returns the payload of each, in order.

    Raises:
        EngineError: a process does not come within the timeout; the message names it.
    """
    process, client = cluster.place(), private_api.coordinator()
    if process is None or client is None:
        return [payload]
    _rendezvous_counts[tag] += 1
    key = f"xla_amp/{_rendezvous_counts[tag]}/{tag}"
    client.key_value_set_bytes(f"{key}/{process.rank}", payload)
    return [
        consistency.wait_for(client, process, f"{key}/{rank}", rank, repr(tag))
        for rank in replicas or range(process.world_size)
    ]
