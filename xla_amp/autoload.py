"""What torch loads at ``import torch`` (entry point group ``torch.backends``): checkpoints and process groups.

`torch.load` then puts the tensors of a checkpoint back on the lazy device, in a process that has not used xla_amp.
`torch.distributed.init_process_group("xla_amp")` starts the device, also in a script that does not import xla_amp.
Nothing more is registered here.  With the name ``jax`` taken, `torch.accelerator` would be the lazy device in every
process of this environment, also in those that use CUDA, and torch's one slot for an out-of-tree device would be
occupied.  So ``torch.device("jax")`` exists after the first use of the device.  Only ``XLA_AMP_HUGGINGFACE=1`` asks for
more: it prepares Accelerate and transformers.
"""

from __future__ import annotations

from typing import Any

from xla_amp.common import config
from xla_amp.engines import torch_registration


def register() -> None:
    """Registers the lazy device's location in checkpoints and the backend of its process groups.

    Starts no device and, unless asked, loads no JAX: torch may be imported by a module of this package that is not
    complete yet.
    """
    torch_registration.register_location(_start)
    torch_registration.register_process_group(_start, _process_group)
    if config.huggingface():
        from xla_amp.integrations import huggingface

        huggingface.enable()


def _start() -> None:
    from xla_amp.pytorch import device

    device.xla_device()


def _process_group(*arguments: Any) -> Any:
    from xla_amp.lazy.processes import process_groups

    return process_groups.make(*arguments)
