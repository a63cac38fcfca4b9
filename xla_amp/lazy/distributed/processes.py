"""Several processes, one device each, that run the same program: JAX's coordinator, XLA's collectives.

Each process has values of its own.  To XLA an array is one that every device holds whole, which it never checks; the
program runs under `jax.shard_map`, where an operation sees its own device's value and a collective sees everybody's.
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

_LONGEST_SILENCE = 100
"""Seconds without a sign of life after which JAX's coordinator takes a process for dead at the latest: its default."""

_meetings = itertools.count()


def join() -> None:
    """Makes this process one of those that ``WORLD_SIZE`` announces; returns when all are there.

    From then on the end of one ends the others: the coordinator misses its sign of life and ends them with a message
    that has its number, at the latest after the timeout.

    Raises:
        EngineError: one of them did not come, or was started with other settings.
    """
    place = config.process()
    if place is None:
        return
    if private_api.coordinator() is None:
        consistency.meet(place)
        _connect(place)
        atexit.register(_leave)  # before JAX's own, which is registered and so runs later
    consistency.watch_regions()
    execute.admit, mesh.ended = consistency.compare, consistency.ended


def _connect(place: config.Process) -> None:
    try:
        with private_api.without_preemption_notice():
            jax.distributed.initialize(
                place.coordinator,
                place.world_size,
                place.rank,
                local_device_ids=None if config.platform() == "cpu" else [place.local_rank],
                initialization_timeout=place.timeout,
                # The coordinator looks at intervals: two thirds leave time for it to see.
                heartbeat_timeout_seconds=min(_LONGEST_SILENCE, 2 * place.timeout // 3),
                shutdown_timeout_seconds=place.timeout,
            )
    except Exception as error:
        raise EngineError(
            f"process {place.rank} of {place.world_size} ({socket.gethostname()}, pid {os.getpid()}) could not meet "
            f"the others at {place.coordinator} within {place.timeout} s: {error}"
        ) from error


_failed = False


def fail() -> None:
    """Says that this process ends with an error: it then leaves at once instead of waiting for the others."""
    global _failed
    _failed = True


def _leave() -> None:
    """At the interpreter's end.  JAX waits there for the other processes, which may wait for this one in a step."""
    if _failed or getattr(sys, "last_value", None) is not None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def world_size() -> int:
    """How many processes train together."""
    place = config.process()
    return 1 if place is None else place.world_size


def ordinal() -> int:
    """Number of this process among all, from 0."""
    place = config.process()
    return 0 if place is None else place.rank


def local_ordinal() -> int:
    """Number of this process on its host, from 0."""
    place = config.process()
    return 0 if place is None else place.local_rank


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Waits for the others at `tag`; everyone's payload (of the processes `replicas` if given), in their order.

    Raises:
        EngineError: somebody does not come within the timeout, which is named.
    """
    place, client = config.process(), private_api.coordinator()
    if place is None or client is None:
        return [payload]
    room = f"xla_amp/{next(_meetings)}/{tag}"
    client.key_value_set_bytes(f"{room}/{place.rank}", payload)
    return [
        consistency.wait_for(client, place, f"{room}/{rank}", rank, repr(tag), binary=True)
        for rank in replicas or range(place.world_size)
    ]


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """``reduce_fn`` of the data of all processes (pickled)."""
    return reduce_fn([pickle.loads(part) for part in rendezvous(tag, pickle.dumps(data))])
