"""Functions of ``torch_xla.core.xla_model``, for both engines: ``import xla_amp.xla_model as xm``.

One row a name, with what it calls.  The collectives record those of the device's processes, as `torch.distributed` with
the backend ``xla_amp`` does.
"""

from xla_amp.common import torch_xla_names as _torch_xla_names
from xla_amp.pytorch.distributed.gradients import (
    broadcast_master_param,
    reduce_gradients,
)
from xla_amp.pytorch.distributed.gradients import fetch_gradients as _fetch_gradients
from xla_amp.pytorch.distributed.script_helpers import RateTracker
from xla_amp.pytorch.distributed.xla_model import (
    add_step_closure,
    get_local_ordinal,
    get_memory_info,
    get_ordinal,
    get_rng_state,
    get_world_size,
    get_xla_supported_devices,
    is_master_ordinal,
    is_xla_tensor,
    mark_step,
    master_print,
    mesh_reduce,
    optimizer_step,
    rendezvous,
    save,
    send_cpu_data_to_device,
    set_rng_state,
    wait_device_ops,
    xla_device,
    xla_device_hw,
    xrt_world_size,
)
from xla_amp.pytorch.distributed.xm_collectives import (
    REDUCE_AND,
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_MUL,
    REDUCE_OR,
    REDUCE_SUM,
    REDUCE_TYPES,
    all_gather,
    all_reduce,
    collective_broadcast,
    reduce_scatter,
)

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "REDUCE_TYPES",
    "RateTracker",
    "_fetch_gradients",
    "add_step_closure",
    "all_gather",
    "all_reduce",
    "broadcast_master_param",
    "collective_broadcast",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "get_world_size",
    "get_xla_supported_devices",
    "is_master_ordinal",
    "is_xla_tensor",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimizer_step",
    "reduce_gradients",
    "reduce_scatter",
    "rendezvous",
    "save",
    "send_cpu_data_to_device",
    "set_rng_state",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
    "xrt_world_size",
]


def __getattr__(name: str) -> object:
    raise _torch_xla_names.missing(__name__, name, __all__)


def __dir__() -> list[str]:
    return __all__
