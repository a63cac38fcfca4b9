"""The lazy torch device on JAX/PJRT: importing this starts nothing, `device()` does."""

from xla_amp.lazy import processes as processes
from xla_amp.lazy.graph.generator import (
    get_rng_state as get_rng_state,
)
from xla_amp.lazy.graph.generator import (
    manual_seed as manual_seed,
)
from xla_amp.lazy.graph.generator import (
    set_rng_state as set_rng_state,
)
from xla_amp.lazy.ops.cast_layers import cast_layer as cast_layer
from xla_amp.lazy.programs.execute import sync as sync
from xla_amp.lazy.programs.metrics import metrics as metrics
from xla_amp.lazy.programs.pjrt import platform as platform
from xla_amp.lazy.steps.rollback import guard as guard
from xla_amp.lazy.steps.rollback import spare as spare
from xla_amp.lazy.steps.step_marker import step_begins as step_begins
from xla_amp.lazy.tensors.later import read_later as read_later
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE as DEVICE_TYPE
from xla_amp.lazy.tensors.transfer import to_device as to_device
from xla_amp.lazy.tensors.transfer import zeros as zeros
from xla_amp.lazy.torch_integration.accelerator import memory_stats as memory_stats
from xla_amp.lazy.torch_integration.device import device as device
from xla_amp.lazy.torch_integration.device import is_started as is_started
