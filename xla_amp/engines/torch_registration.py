"""Register the lazy device with torch: where `torch.load` puts its tensors, and its process groups.

What starts the device is above this layer, so the caller passes it.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from xla_amp.common import config
from xla_amp.common.events import Point
from xla_amp.common.types import LAZY
from xla_amp.engines import base
from xla_amp.errors import DeviceError

PROCESS_GROUP = "xla_amp"
"""The backend of `torch.distributed`."""
_PRIORITY = 5
"""Before torch's own handlers of locations, which begin at 10."""


@Point
def device_wanted() -> object:
    """A checkpoint has a tensor of the device: starts it."""


def register_location(start: Callable[[], object]) -> None:
    """Registers the lazy device's location in checkpoints, unless it is registered.  Starts no device.

    Args:
        start: starts the device; called when a checkpoint has a tensor of it.
    """
    from torch import serialization

    if not device_wanted.listeners:
        device_wanted.subscribe(start)
        serialization.register_package(_PRIORITY, _tag, _restore)


def register_process_group(start: Callable[[], object], make: Callable[..., Any]) -> None:
    """Registers the backend ``xla_amp`` of `torch.distributed`, whose default timeout is ``XLA_AMP_TIMEOUT``.

    Args:
        start: starts the device.
        make: makes the backend of one group from a store, a rank, the number of processes and a timeout.
    """
    from torch import distributed

    if not distributed.is_available() or PROCESS_GROUP in distributed.Backend.backend_list:
        return
    from torch.distributed import distributed_c10d

    def process_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        base.require_lazy("torch.distributed.init_process_group('xla_amp')", "the backend 'xla'")
        if not base.select().is_started():
            config.place_in_group(rank, size)
        start()
        return make(store, rank, size, timeout)

    distributed.Backend.register_backend(PROCESS_GROUP, process_group, devices=["cpu", LAZY])
    original = getattr(distributed_c10d, "_get_default_timeout", None)
    if original is None:  # private: `import torch` must not fail without it; the default is torch's then
        return

    @functools.wraps(original)
    def default_timeout(backend: Any) -> datetime.timedelta:
        return datetime.timedelta(seconds=config.timeout()) if PROCESS_GROUP in backend else original(backend)

    distributed_c10d._get_default_timeout = default_timeout


def _tag(storage: Any) -> str | None:
    """The location that `torch.save` writes for a storage."""
    return f"{LAZY}:0" if storage.device.type == LAZY else None


def _restore(storage: Any, location: str) -> Any:
    """`storage`, which is on the CPU, at a location; None for other devices.  Starts the device.

    Raises:
        DeviceError: torch_xla's location, without torch_xla.
    """
    if location.partition(":")[0] == "xla" and find_spec("torch_xla") is None:
        raise DeviceError(
            f"torch.load to {location!r} needs torch_xla: write map_location=xla_amp.xla_device() or {LAZY!r} for the "
            "lazy XLA device"
        )
    if location.partition(":")[0] != LAZY:
        return None
    base.require_lazy(f"torch.load to {location!r}", "map_location='cpu'")
    device_wanted()
    return torch.UntypedStorage(storage.nbytes(), device=torch.device(location)).copy_(storage)
