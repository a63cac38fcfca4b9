"""Stubs for `torch.distributed` operations on lazy tensors: each raises an error that names the replacement.

A process group of torch (gloo, NCCL) sends memory, and lazy tensors have none.  Reducing gradients with it would also
end the step in the middle.  Data loading is not affected: `DistributedSampler` works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from xla_amp.errors import DeviceError

_REDUCE = "xla_model.all_reduce(xla_model.REDUCE_SUM, tensor)"
_GATHER = "xla_model.all_gather(tensor, dim)"
_SCATTER = "xla_model.reduce_scatter(...)"
_SEND = "xla_model.collective_permute(tensor, pairs)"
_MEET = "xla_model.mesh_reduce(tag, data, function)"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "_allgather_base_": _GATHER,
        "_reduce_scatter_base_": _SCATTER,
        "allgather_": _GATHER,
        "allgather_coalesced_": _GATHER,
        "allgather_into_tensor_coalesced_": _GATHER,
        "allreduce_": _REDUCE,
        "allreduce_coalesced_": _REDUCE,
        "alltoall_": "xla_model.all_to_all(...)",
        "alltoall_base_": "xla_model.all_to_all(...)",
        "broadcast_": "xla_model.collective_broadcast([tensor], root)",
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
            "is part of the step. Instead of DistributedDataParallel or FullyShardedDataParallel train the bare model "
            "and call xla_model.reduce_gradients(optimizer) after backward(), or xla_model.optimizer_step(optimizer); "
            "xla_amp.mark_sharding splits parameters"
        )

    return kernel


KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: _refuse(name, instead) for name, instead in INSTEAD.items()}
)
