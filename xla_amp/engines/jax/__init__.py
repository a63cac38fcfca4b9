"""The lazy torch device on JAX/PJRT: importing this starts nothing, `device()` does."""

from xla_amp.engines.jax import processes, uncast
from xla_amp.engines.jax.boundary import step_begins
from xla_amp.engines.jax.cut import sync
from xla_amp.engines.jax.device import device, is_started
from xla_amp.engines.jax.fresh import zeros
from xla_amp.engines.jax.metrics import metrics
from xla_amp.engines.jax.random import get_rng_state, manual_seed, set_rng_state
from xla_amp.engines.jax.runtime import platform
from xla_amp.engines.jax.select import restore_where, snapshot
from xla_amp.engines.jax.storage import DEVICE_TYPE
from xla_amp.engines.jax.transfer import to_device

__all__ = [
    "DEVICE_TYPE",
    "device",
    "get_rng_state",
    "is_started",
    "manual_seed",
    "metrics",
    "platform",
    "processes",
    "restore_where",
    "set_rng_state",
    "snapshot",
    "step_begins",
    "sync",
    "to_device",
    "uncast",
    "zeros",
]
