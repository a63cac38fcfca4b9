"""What torch loads at ``import torch`` (entry point group ``torch.backends``): checkpoints and process groups.

`torch.load` then puts the tensors of a checkpoint back on the lazy device, in a process that has not used xla_amp.
`torch.distributed.init_process_group("xla_amp")` starts the device, also in a script that does not import xla_amp.
Nothing more is registered here.  With the name ``jax`` taken, `torch.accelerator` would be the lazy device in every
process of this environment, also in those that use CUDA, and torch's one slot for an out-of-tree device would be
occupied.  So ``torch.device("jax")`` exists after the first use of the device.  Only ``XLA_AMP_HUGGINGFACE=1`` asks for
more: it prepares Accelerate and transformers.
"""

from __future__ import annotations

import datetime
import functools
import importlib
from typing import Any

import torch

from xla_amp.backends import base
from xla_amp.common import config
from xla_amp.common.types import LAZY

PROCESS_GROUP = "xla_amp"
"""The backend of `torch.distributed`."""
_PRIORITY = 5
"""Before torch's own handlers of locations, which begin at 10."""


@functools.cache
def register() -> None:
    """Registers the lazy device's location in checkpoints and the backend of its process groups.

    Starts no device and, unless asked, loads no JAX.

    torch may be imported by a module of this package that is not complete yet, so nothing here reads `base`.
    """
    from torch import serialization

    serialization.register_package(_PRIORITY, _tag, _restore)
    register_process_group()
    if config.huggingface():
        importlib.import_module("xla_amp.integrations.huggingface").enable()


def register_process_group() -> None:
    """Registers the backend ``xla_amp`` of `torch.distributed`, whose default timeout is ``XLA_AMP_TIMEOUT``."""
    from torch import distributed

    if not distributed.is_available() or PROCESS_GROUP in distributed.Backend.backend_list:
        return
    from torch.distributed import distributed_c10d

    distributed.Backend.register_backend(PROCESS_GROUP, _process_group, devices=["cpu", LAZY])
    original = getattr(distributed_c10d, "_get_default_timeout", None)
    if original is None:  # private: `import torch` must not fail without it; the default is torch's then
        return

    @functools.wraps(original)
    def default_timeout(backend: Any) -> datetime.timedelta:
        return datetime.timedelta(seconds=config.timeout()) if PROCESS_GROUP in backend else original(backend)

    distributed_c10d._get_default_timeout = default_timeout


def _process_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    base.require_lazy("torch.distributed.init_process_group('xla_amp')", "the backend 'xla'")
    if not base.select().is_started():
        config.place_in_group(rank, size)
    _start()
    return importlib.import_module("xla_amp.lazy.distributed.process_groups").make(store, rank, size, timeout)


def _start() -> None:
    # By name, because the front is above this layer: it starts the engine and prepares autograd and autocast for it.
    importlib.import_module("xla_amp.pytorch.distributed.xla_model").xla_device()


def _tag(storage: Any) -> str | None:
    """The location that `torch.save` writes for a storage."""
    return f"{LAZY}:0" if storage.device.type == LAZY else None


def _restore(storage: Any, location: str) -> Any:
    """`storage`, which is on the CPU, at a location; None for other devices.  Starts the device."""
    if location.partition(":")[0] != LAZY:
        return None
    base.require_lazy(f"torch.load to {location!r}", "map_location='cpu'")
    _start()
    return torch.UntypedStorage(storage.nbytes(), device=torch.device(location)).copy_(storage)
