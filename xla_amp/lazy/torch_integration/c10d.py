"""Collectives of `torch.distributed` on lazy tensors, in a process group (gloo) that has the device's processes.

A process group sends memory, and lazy tensors have none.  So these operations run the device's collectives: in a
backward pass, where DistributedDataParallel reduces gradients, as a part of the step, elsewhere as a program between
those of the steps.  Others raise an error that names the replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from xla_amp.errors import DeviceError
from xla_amp.lazy import private_api
from xla_amp.lazy.distributed import collectives, processes
from xla_amp.lazy.runtime.execute import sync

_REDUCE = "xla_model.all_reduce(xla_model.REDUCE_SUM, tensor)"
_GATHER = "xla_model.all_gather(tensor, dim)"
_SCATTER = "xla_model.reduce_scatter(...)"
_SEND = "xla_model.collective_permute(tensor, pairs)"
_MEET = "xla_model.mesh_reduce(tag, data, function)"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "_reduce_scatter_base_": _SCATTER,
        "allgather_coalesced_": _GATHER,
        "allgather_into_tensor_coalesced_": _GATHER,
        "allreduce_coalesced_": _REDUCE,
        "alltoall_": "xla_model.all_to_all(...)",
        "alltoall_base_": "xla_model.all_to_all(...)",
        "gather_": _GATHER,
        "recv_": _SEND,
        "recv_any_source_": _SEND,
        "reduce_": _REDUCE,
        "reduce_scatter_": _SCATTER,
        "reduce_scatter_tensor_coalesced_": _SCATTER,
        "scatter_": _MEET,
        "send": _SEND,
    }
)
"""Operation of torch's library ``c10d`` -> its replacement inside a step."""


def _refuse(name: str, instead: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise DeviceError(
            f"torch.distributed ({name.strip('_')}) cannot reach tensors of the lazy XLA device: use {instead}, which "
            "is part of the step. Instead of FullyShardedDataParallel split parameters with xla_amp.mark_sharding"
        )

    return kernel


_REDUCTIONS = {"SUM": "sum", "AVG": "sum", "PRODUCT": "mul", "MIN": "min", "MAX": "max", "BAND": "and", "BOR": "or"}
"""torch's names of reductions -> ours."""


def _alone(call: str, group: Any, collective: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """The results of a collective that is a program for itself, so that processes may read what they like around it."""
    size = private_api.size_of_process_group(group)
    if size != processes.world_size():
        raise DeviceError(
            f"torch.distributed.{call}: the group has {size} processes, and tensors of the lazy XLA device are "
            f"exchanged among all {processes.world_size()}; use xla_model with groups=, which is part of the step"
        )
    in_backward = torch._C._current_graph_task_id() != -1  # DistributedDataParallel's: a part of the step
    if not in_backward:
        sync()
    results = collective()
    if not in_backward:
        sync()
    return results


def _write(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value.reshape(target.shape))


def _all_reduce(tensors: list[torch.Tensor], group: Any, operation: Any, *rest: Any) -> Any:
    name = torch.distributed.ReduceOp.RedOpType(operation.op()).name
    if name not in _REDUCTIONS:
        raise DeviceError(f"torch.distributed.all_reduce(op={name}): expected one of {', '.join(_REDUCTIONS)}")
    reduced = _alone("all_reduce", group, lambda: collectives.all_reduce(_REDUCTIONS[name], tensors))
    _write(tensors, [x / processes.world_size() for x in reduced] if name == "AVG" else reduced)
    return tensors, private_api.finished_work(tensors)


def _broadcast(tensors: list[torch.Tensor], group: Any, root: int, *rest: Any) -> Any:
    _write(
        tensors,
        _alone("broadcast", group, lambda: collectives.collective("collective_broadcast", tensors, None, root=root)),
    )
    return tensors, private_api.finished_work(tensors)


def _gathered(group: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of each tensor those of all processes, along a new first dimension."""
    parts = [tensor.unsqueeze(0) for tensor in tensors]
    return _alone("all_gather", group, lambda: collectives.collective("all_gather", parts, None, dim=0))


def _all_gather(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], group: Any, *rest: Any) -> Any:
    for targets, gathered in zip(outputs, _gathered(group, inputs), strict=True):
        _write(targets, list(gathered.unbind()))
    return outputs, private_api.finished_work(outputs)


def _all_gather_base(output: torch.Tensor, tensor: torch.Tensor, group: Any, *rest: Any) -> Any:
    _write([output], _gathered(group, [tensor]))
    return output, private_api.finished_work([output])


def _barrier(tensor: torch.Tensor, group: Any, *rest: Any) -> Any:
    _alone("barrier", group, lambda: [])
    processes.rendezvous("torch.distributed.barrier")
    return private_api.finished_work()


KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "_allgather_base_": _all_gather_base,
        "allgather_": _all_gather,
        "allreduce_": _all_reduce,
        "barrier": _barrier,
        "broadcast_": _broadcast,
        **{name: _refuse(name, instead) for name, instead in INSTEAD.items()},
    }
)
"""Operation of torch's library ``c10d`` -> its kernel."""
