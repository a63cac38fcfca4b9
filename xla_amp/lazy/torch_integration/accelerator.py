"""The device for ``torch.accelerator``: memory statistics, selection, its only stream and events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from xla_amp.engines import base
from xla_amp.errors import DeviceError
from xla_amp.lazy.programs import pjrt
from xla_amp.lazy.programs.execute import sync
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

_TORCH_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "allocated_bytes.all.current": ("bytes_in_use",),
        "allocated_bytes.all.peak": ("peak_bytes_in_use",),
        "reserved_bytes.all.current": ("pool_bytes", "bytes_in_use"),
        "reserved_bytes.all.peak": ("peak_pool_bytes", "peak_bytes_in_use"),
    }
)
"""Statistic that ``torch.accelerator.memory_allocated()`` and its relatives read -> PJRT's, the first that exists."""


def memory_stats() -> dict[str, int]:
    """PJRT's statistics in bytes; on a platform without them (XLA:CPU), those of JAX's live arrays.

    The peak of live arrays is taken after the first run of each program and whenever statistics are read.
    """
    found = pjrt.jax_device().memory_stats()
    if found:
        return dict(found)
    live, peak = pjrt.live_bytes()
    return {"bytes_in_use": live, "peak_bytes_in_use": peak}


def allocator_stats() -> dict[str, int]:
    """`memory_stats` with torch's names added."""
    stats = memory_stats()
    for name, sources in _TORCH_NAMES.items():
        stats[name] = next((stats[source] for source in sources if source in stats), 0)
    return stats


def free_and_total() -> tuple[int, int]:
    """Bytes of device memory that are free, and in all.

    Raises:
        DeviceError: the platform does not count them.
    """
    stats = memory_stats()
    if "bytes_limit" not in stats:
        raise DeviceError(
            f"the platform {pjrt.platform()!r} keeps no statistic bytes_limit of its memory, only {', '.join(stats)}: "
            "see torch.accelerator.memory_stats()"
        )
    return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]


def reset_peak() -> None:
    """Lowers the peak to the bytes in use.

    Raises:
        DeviceError: the platform counts itself.
    """
    if pjrt.jax_device().memory_stats():
        refuse_reset()
    pjrt.reset_peak()


def refuse_reset() -> None:
    """Raises: the statistics cannot be reset."""
    raise DeviceError("PJRT's memory statistics count from the start of the process and cannot be reset")


def select(device: Any) -> int:
    """Index of the device that was selected before: 0, the only one of a process.

    None and a negative index select nothing, as in torch.cuda.

    Raises:
        TypeError: `device` is no device, device's name, or index.
        DeviceError: it does not exist, or is of another type.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != base.LAZY:
            raise DeviceError(f"expected a device of the type {base.LAZY!r}, got {str(device)!r}")
        device = device.index
    if device is None:
        return 0
    if isinstance(device, bool) or not hasattr(device, "__index__"):
        raise TypeError(f"expected a device, its name, or its index, got {device!r}, a {type(device).__name__}")
    if device.__index__() > 0:
        raise DeviceError(f"device {base.LAZY}:{device} does not exist: a process has one lazy device, '{base.LAZY}:0'")
    return 0


def synchronize(device: Any) -> None:
    """Runs what was recorded and waits for the device; raises as `select` does."""
    select(device)
    sync(wait=True)


# ---- the device's only stream, and events ----------------------------------------------------------------------------


class _InOrder:
    """What streams and events of the device's only stream do: all that is recorded later runs later."""

    def synchronize(self) -> None:
        """Runs what was recorded, also after the event, and waits for the device."""
        sync(wait=True)

    def query(self) -> bool:
        """Waits as `synchronize` does, so that the answer is True."""
        sync(wait=True)
        return True

    def wait(self, other: Any = None) -> None:
        """Returns at once: the other stream is this one."""

    wait_stream = wait_event = wait


class Stream(_InOrder, torch.Stream):
    """``torch.jax.Stream``: another name of the device's only stream, whatever its priority.

    Raises:
        DeviceError: the device does not exist.
    """

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        select(device)
        return super().__new__(cls, device=DEVICE_TYPE)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Records an event, a new one if none is given."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(_InOrder, torch.Event):
    """``torch.jax.Event``: a point in the device's only stream.

    With `enable_timing`, `record` runs what was recorded and waits for the device, which ends the step's program there:
    between two such events lies the time of the work that was recorded between them.

    Args:
        enable_timing: whether `elapsed_time` is wanted.
        blocking: without effect.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Event:
        event = super().__new__(cls, device=DEVICE_TYPE, enable_timing=enable_timing)
        event._timed, event._time = enable_timing, None
        return event

    _timed: bool
    _time: float | None
    """Seconds of the host's clock at `record`, with `enable_timing`."""

    def record(self, stream: Any = None) -> None:
        """Marks this point; waits for the device if the event measures time."""
        if self._timed:
            sync(wait=True)
            self._time = time.perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`.

        Raises:
            ValueError: one of them was made without `enable_timing`, or not recorded.
        """
        begin: float | None = self._time
        end: float | None = getattr(end_event, "_time", None)
        if begin is None or end is None:
            raise ValueError(
                "elapsed_time(): expected two events of torch.jax.Event(enable_timing=True), both recorded with "
                "event.record()"
            )
        return 1000 * (end - begin)
