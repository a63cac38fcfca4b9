"""What torch loads at ``import torch`` (entry point group ``torch.backends``): checkpoints of the lazy device.

`torch.load` then puts the tensors of a checkpoint back on the lazy device, in a process that has not used xla_amp.
Nothing more is registered here.  With the name ``jax`` taken, `torch.accelerator` would be the lazy device in every
process of this environment, also in those that use CUDA, and torch's one slot for an out-of-tree device would be
occupied.  So ``torch.device("jax")`` exists after the first use of the device.  Only ``XLA_AMP_HUGGINGFACE=1`` asks for
more: it prepares Accelerate and transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from xla_amp import config
from xla_amp.backends import base

_PRIORITY = 5
"""Before torch's own handlers of locations, which begin at 10."""


def register() -> None:
    """Registers the lazy device's location in checkpoints; starts no device and, unless asked, loads no JAX."""
    from torch import serialization

    if not any(tag is _tag for _, tag, _ in serialization._package_registry):
        serialization.register_package(_PRIORITY, _tag, _restore)
        if config.huggingface():
            importlib.import_module("xla_amp.integrations.huggingface").enable()


def _tag(storage: Any) -> str | None:
    """The location that `torch.save` writes for a storage."""
    return f"{base.LAZY}:0" if storage.device.type == base.LAZY else None


def _restore(storage: Any, location: str) -> Any:
    """`storage`, which is on the CPU, at a location; None for other devices.  Starts the device."""
    if location.partition(":")[0] != base.LAZY:
        return None
    base.require_lazy(f"torch.load to {location!r}", "map_location='cpu'")
    # By name, because the front is above this layer: it starts the engine and prepares autograd and autocast for it.
    importlib.import_module("xla_amp.pytorch.distributed.xla_model").xla_device()
    return torch.UntypedStorage(storage.nbytes(), device=torch.device(location)).copy_(storage)
