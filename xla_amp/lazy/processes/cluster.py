"""Which job this process belongs to.

In this order: the variables of torchrun and `xla_amp.launch`, which stand closest to the process (torchrun may itself
be one task of a Slurm job); a `jax.distributed` that the program has initialized; and what JAX finds out about the
cluster, of Slurm, Open MPI and TPU pods.  A task of several that is none of these is an error: it would train alone.
"""

from __future__ import annotations

import functools

from xla_amp.common import config
from xla_amp.common.config import Process
from xla_amp.errors import EngineError
from xla_amp.lazy.base import private_api


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, which no other machine reaches."""
    return host in ("localhost", "::1") or host.startswith("127.")


def place() -> Process | None:
    """Rank of this process and how to reach the others; None for a process that trains alone.

    Raises:
        EngineError: the variables and `jax.distributed` disagree, or this is a task of a job that is not understood.
        PolicyError: the variables are inconsistent.
    """
    if config.alone():
        return None
    named, joined = config.process(), private_api.joined()
    if joined is None:
        return named if named is not None or config.is_placed() else _of_cluster()
    address, count, rank = joined
    if named is not None and (named.rank, named.world_size) != (rank, count):
        raise EngineError(
            f"jax.distributed says that this is process {rank} of {count}, RANK and WORLD_SIZE that it is process "
            f"{named.rank} of {named.world_size}; leave jax.distributed.initialize() out (the device calls it), or "
            "unset RANK and WORLD_SIZE"
        )
    if named is not None or count == 1:
        return named
    local_rank = config.local_rank()
    return Process(rank, count, rank if local_rank is None else local_rank, address, config.timeout(), None)


def world_size() -> int:
    """Number of processes."""
    process = place()
    return 1 if process is None else process.world_size


def ordinal() -> int:
    """Rank of this process, from 0."""
    process = place()
    return 0 if process is None else process.rank


@functools.cache
def _of_cluster() -> Process | None:
    """What JAX says about the cluster, asked once: it may look at the machine's metadata."""
    timeout = config.timeout()
    try:
        found = private_api.cluster(timeout)
    except Exception as error:  # an unexpected form of a cluster's variables
        reason = str(error).rstrip(".")
        raise EngineError(f"JAX could not read where this process is in its cluster: {reason}. {_WAYS_OUT}") from error
    task = config.task()
    if found is None and task is not None:
        name, rank, count = task
        raise EngineError(
            f"{name} says that this is task {rank} of {count}, and what JAX needs to find the others is missing. "
            f"{_WAYS_OUT}"
        )
    if found is None or found[1] == 1:
        return None
    address, count, rank, local_rank = found
    return Process(rank, count, rank if local_rank is None else local_rank, address, timeout, None)


_WAYS_OUT = (
    "Start it with srun, mpirun or torchrun, or call jax.distributed.initialize(address, processes, rank) first; "
    "XLA_AMP_ALONE=1 makes each task train alone"
)
