"""The lazy torch device on JAX/PJRT: importing this starts nothing, `device()` does."""

from xla_amp.lazy.distributed import processes
from xla_amp.lazy.ops.cast_layers import cast_layer
from xla_amp.lazy.programs.execute import sync
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.programs.pjrt import platform
from xla_amp.lazy.steps.rollback import guard, spare
from xla_amp.lazy.steps.step_marker import step_begins
from xla_amp.lazy.tensors.later import read_later
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.tensors.transfer import to_device, zeros
from xla_amp.lazy.torch_integration.accelerator import memory_stats
from xla_amp.lazy.torch_integration.device import device, is_started
from xla_amp.lazy.torch_integration.generator import get_rng_state, manual_seed, set_rng_state

__all__ = [
    "DEVICE_TYPE",
    "cast_layer",
    "device",
    "get_rng_state",
    "guard",
    "is_started",
    "manual_seed",
    "memory_stats",
    "metrics",
    "platform",
    "processes",
    "read_later",
    "set_rng_state",
    "spare",
    "step_begins",
    "sync",
    "to_device",
    "zeros",
]
