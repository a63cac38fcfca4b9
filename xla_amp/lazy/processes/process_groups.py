"""The backend ``xla_amp`` of `torch.distributed`: process groups of the device's processes.

Tensors of the lazy device travel in collectives of the step (`torch_integration.c10d`), those of the CPU through gloo.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch

from xla_amp.engines import torch_registration
from xla_amp.errors import DeviceError
from xla_amp.lazy.processes import cluster, collectives
from xla_amp.lazy.steps import step_marker


class Members(NamedTuple):
    """The processes of a collective."""

    ranks: tuple[int, ...]
    """Of the group that this process is in."""
    groups: collectives.Groups
    """All groups that work at the same time; None is one of all processes."""

    @property
    def size(self) -> int:
        """Processes in a group."""
        return len(self.ranks)


def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """What `torch.distributed.init_process_group` and `new_group` ask for: the backend of one group.

    Raises:
        DeviceError: torch's rank or number of processes is not the device's.
    """
    place, mine = cluster.place(), (cluster.ordinal(), cluster.world_size())
    if size > mine[1] or (size == mine[1] and rank != mine[0]):
        raise DeviceError(
            f"init_process_group('xla_amp'): torch says that this is process {rank} of {size}, the device that it is "
            f"process {mine[0]} of {mine[1]}. Start the script with torchrun; or set MASTER_ADDR and MASTER_PORT, and "
            "call init_process_group before the first use of the device"
        )
    if mine[1] > 1:
        step_marker.end_with_optimizer()
    gloo = torch.distributed.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    local = place is None or cluster.is_loopback(place.host)
    options._devices = [gloo.create_device(hostname="127.0.0.1") if local else gloo.create_default_device()]
    return gloo(store, rank, size, options)


def is_ours(group: Any) -> bool:
    """Whether a process group has the backend ``xla_amp``."""
    return torch_registration.PROCESS_GROUP in torch.distributed.get_backend(group)


def members(call: str, group: Any) -> Members:
    """The processes of a group, and the other groups that call the same collective at the same time.

    XLA runs one program on all processes, so a group of some needs a group of the same size for each of the others: the
    rows or columns of a mesh, as `torch.distributed.new_subgroups` makes them.

    Raises:
        DeviceError: other processes than the device's, or a group that is neither row nor column.
    """
    world = cluster.world_size()
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    if torch.distributed.get_world_size() != world:
        raise DeviceError(
            f"torch.distributed.{call}: the group has {torch.distributed.get_world_size()} processes, and tensors of "
            f"the lazy XLA device are exchanged among all {world}; start the script with torchrun"
        )
    if ranks == tuple(range(world)) or len(ranks) == 1:
        return Members(ranks, None)
    groups = rows_or_columns(ranks, world)
    if groups is not None:
        return Members(ranks, groups)
    raise DeviceError(
        f"torch.distributed.{call}: the group has processes {list(ranks)} of {world}; on the lazy XLA device all "
        "processes run one program, so a group is a row or a column of a mesh of them, such as [0, 1] or [0, 2] of 4; "
        "use such groups, or xla_model with groups="
    )


def rows_or_columns(ranks: tuple[int, ...], world: int) -> collectives.Groups:
    """All groups of the mesh of processes in which `ranks` are a row or a column; None if they are neither.

    Example:
        >>> rows_or_columns((1, 3), 4)
        ((0, 2), (1, 3))
    """
    stride = ranks[1] - ranks[0]
    if stride < 1 or world % (len(ranks) * stride):
        return None
    mesh = np.arange(world).reshape(-1, len(ranks), stride)
    groups = tuple(map(tuple, mesh.swapaxes(1, 2).reshape(-1, len(ranks)).tolist()))
    return groups if ranks in groups else None
