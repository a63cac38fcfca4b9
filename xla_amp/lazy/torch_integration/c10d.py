"""Collectives of `torch.distributed` on lazy tensors, in a process group that has the device's processes.

A process group sends memory, and lazy tensors have none.  So these operations run the device's collectives.  In a
training step they are a part of its program (with the backend ``gloo`` only those of a backward pass are).  Elsewhere a
collective is a program for itself, so that one process may read what it likes before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from xla_amp.errors import DeviceError
from xla_amp.lazy import processes
from xla_amp.lazy.base import private_api
from xla_amp.lazy.processes import collectives, process_groups
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.torch_integration import torch_parallel
from xla_amp.torch_common import module_paths

_SEND = "all_gather, of which each process takes the part that it wants"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "gather_": "all_gather, which gives every process all parts",
        "gather_into_tensor_": "all_gather_into_tensor, which gives every process all parts",
        "monitored_barrier_": "barrier",
        "recv_": _SEND,
        "recv_any_source_": _SEND,
        "reduce_": "all_reduce, which gives every process the result",
        "scatter_": "broadcast, and let each process take its part",
        "send": _SEND,
    }
)
"""Operation of torch's library ``c10d`` in which processes do different things -> one in which all do the same."""

_REDUCTIONS = {"SUM": "sum", "AVG": "sum", "PRODUCT": "mul", "MIN": "min", "MAX": "max", "BAND": "and", "BOR": "or"}
"""torch's names of reductions -> ours."""


def _refuse(name: str, instead: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise DeviceError(
            f"torch.distributed.{name.strip('_')} does not reach tensors of the lazy XLA device, whose processes run "
            f"one program: use {instead}"
        )

    return kernel


_Members = process_groups.Members


def _exchange(call: str, boxed: Any, collective: Callable[[_Members], None]) -> None:
    """Records a collective, with what writes its results; outside of a training step it is a program for itself."""
    group = private_api.process_group(boxed)
    members = process_groups.members(call, group)
    # The backward pass is DistributedDataParallel's.
    in_step = module_paths.in_backward() or (step_marker.is_open() and process_groups.is_ours(group))
    if not in_step:
        step_marker.end_program()
    collective(members)
    if not in_step:
        step_marker.end_program()


def _results(name: str, members: _Members, tensors: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    if members.size == 1:
        return [tensor.clone() for tensor in tensors]
    return collectives.collective(name, tensors, members.groups, **options)


def _write(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value.reshape(target.shape))


def _reduction(call: str, operation: Any) -> tuple[str, bool]:
    """Our name of a reduction, and whether the result is divided by the number of processes."""
    name = torch.distributed.ReduceOp.RedOpType(operation.op()).name
    if name not in _REDUCTIONS:
        raise DeviceError(f"torch.distributed.{call}(op={name}): expected one of {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[name], name == "AVG"


def _all_reduce_coalesced(tensors: list[torch.Tensor], group: Any, operation: Any, *_: Any) -> None:
    kind, average = _reduction("all_reduce", operation)

    def reduce(members: _Members) -> None:
        if members.size > 1:
            reduced = _results("all_reduce", members, tensors, reduce_type=kind)
            _write(tensors, [x / members.size for x in reduced] if average else reduced)

    _exchange("all_reduce", group, reduce)


def _all_reduce(tensors: list[torch.Tensor], group: Any, operation: Any, sparse_indices: Any, *_: Any) -> None:
    if sparse_indices is not None or any(tensor.is_sparse for tensor in tensors):
        raise DeviceError(
            "torch.distributed.all_reduce: sparse tensors are not reduced on the lazy XLA device; "
            f"{torch_parallel.WITHOUT_DDP}, or use sparse=False"
        )
    _all_reduce_coalesced(tensors, group, operation)


def _broadcast(tensors: list[torch.Tensor], group: Any, root: int, *_: Any) -> None:
    def send(members: _Members) -> None:
        roots = tuple(ranks[root] for ranks in members.groups or [members.ranks])
        _write(tensors, _results("collective_broadcast", members, tensors, root=roots))

    _exchange("broadcast", group, send)


def _all_gather(targets: list[list[torch.Tensor]], tensors: list[torch.Tensor], group: Any, *_: Any) -> None:
    """Of each tensor those of all processes: to a list of tensors each, or to one that has them behind each other."""

    def gather(members: _Members) -> None:
        gathered = _results("all_gather", members, [tensor.unsqueeze(0) for tensor in tensors], dim=0)
        for parts, whole in zip(targets, gathered, strict=True):
            _write(parts, [whole] if len(parts) == 1 else list(whole.unbind()))

    _exchange("all_gather", group, gather)


def _all_gather_base_coalesced(targets: list[torch.Tensor], tensors: list[torch.Tensor], group: Any, *_: Any) -> None:
    _all_gather([[target] for target in targets], tensors, group)


def _all_gather_base(target: torch.Tensor, tensor: torch.Tensor, group: Any, *_: Any) -> None:
    _all_gather([[target]], [tensor], group)


def _scatter(targets: list[torch.Tensor], wholes: Callable[[], list[torch.Tensor]], group: Any, operation: Any) -> None:
    """Reduces each whole, whose first dimension is the number of processes; this process gets its row of it."""
    kind, average = _reduction("reduce_scatter", operation)

    def scatter(members: _Members) -> None:
        parts = _results("reduce_scatter", members, wholes(), reduce_type=kind, dim=0)
        _write(targets, [part / members.size for part in parts] if average else parts)

    _exchange("reduce_scatter", group, scatter)


def _rows(call: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    if tensor.numel() % count:
        raise DeviceError(
            f"torch.distributed.{call}: a tensor of shape {list(tensor.shape)} does not divide over {count} processes"
        )
    return tensor.reshape(count, -1)


def _stacked(call: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    if len({tensor.shape for tensor in tensors}) > 1:
        raise DeviceError(
            f"torch.distributed.{call}: expected tensors of one shape on the lazy XLA device, got "
            f"{[list(tensor.shape) for tensor in tensors]}; pad them"
        )
    return torch.stack([tensor.reshape(-1) for tensor in tensors])


def _reduce_scatter(
    targets: list[torch.Tensor], lists: list[list[torch.Tensor]], group: Any, operation: Any, *_: Any
) -> None:
    _scatter(targets, lambda: [_stacked("reduce_scatter", each) for each in lists], group, operation)


def _reduce_scatter_base_coalesced(
    targets: list[torch.Tensor], wholes: list[torch.Tensor], group: Any, operation: Any, *_: Any
) -> None:
    count = private_api.process_group(group).size()
    _scatter(targets, lambda: [_rows("reduce_scatter_tensor", whole, count) for whole in wholes], group, operation)


def _reduce_scatter_base(target: torch.Tensor, whole: torch.Tensor, group: Any, operation: Any, *_: Any) -> None:
    _reduce_scatter_base_coalesced([target], [whole], group, operation)


def _all_to_all(targets: list[torch.Tensor], tensors: list[torch.Tensor], group: Any, *_: Any) -> None:
    def send(members: _Members) -> None:
        [received] = _results("all_to_all", members, [_stacked("all_to_all", tensors)])
        _write(targets, list(received.unbind()))

    _exchange("all_to_all", group, send)


def _all_to_all_base(
    target: torch.Tensor, tensor: torch.Tensor, group: Any, output_splits: list[int], input_splits: list[int], *_: Any
) -> None:
    if len({*output_splits, *input_splits}) > 1:
        raise DeviceError(
            f"torch.distributed.all_to_all_single: expected parts of one size on the lazy XLA device, got splits "
            f"{input_splits} of the input and {output_splits} of the output; pad them"
        )

    def send(members: _Members) -> None:
        rows = _rows("all_to_all_single", tensor, members.size)
        _write([target], _results("all_to_all", members, [rows]))

    _exchange("all_to_all_single", group, send)


def _barrier(tensor: torch.Tensor, group: Any, *_: Any) -> None:
    def meet(members: _Members) -> None:
        if members.size > 1:
            processes.rendezvous("torch.distributed.barrier", replicas=members.ranks)

    _exchange("barrier", group, meet)


def _kernel(name: str, exchange: Callable[..., None]) -> Callable[..., Any]:
    work_only = name in ("alltoall_base_", "barrier") or name.endswith("coalesced_")

    def kernel(targets: Any, *args: Any) -> Any:
        exchange(targets, *args)
        work = private_api.finished_work([targets] if isinstance(targets, torch.Tensor) else targets)
        return work if work_only else (targets, work)

    return kernel


_EXCHANGES: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "_allgather_base_": _all_gather_base,
        "_reduce_scatter_base_": _reduce_scatter_base,
        "allgather_": _all_gather,
        "allgather_coalesced_": _all_gather,
        "allgather_into_tensor_coalesced_": _all_gather_base_coalesced,
        "allreduce_": _all_reduce,
        "allreduce_coalesced_": _all_reduce_coalesced,
        "alltoall_": _all_to_all,
        "alltoall_base_": _all_to_all_base,
        "barrier": _barrier,
        "broadcast_": _broadcast,
        "reduce_scatter_": _reduce_scatter,
        "reduce_scatter_tensor_coalesced_": _reduce_scatter_base_coalesced,
    }
)
KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **{name: _kernel(name, exchange) for name, exchange in _EXCHANGES.items()},
        **{name: _refuse(name, instead) for name, instead in INSTEAD.items()},
    }
)
"""Operation of torch's library ``c10d`` -> its kernel."""
