"""The device's only stream and its events: operations and copies run in the order in which they are recorded.

torch's own `torch.Stream` and `torch.Event` ask a C++ device guard, which answers at once that everything is done.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from xla_amp.lazy.programs.execute import sync
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import accelerator


class Stream(torch.Stream):
    """``torch.jax.Stream``: another name of the device's only stream, whatever its priority.

    Raises:
        DeviceError: the device does not exist.
    """

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        accelerator.select(device)
        return super().__new__(cls, device=DEVICE_TYPE)

    def synchronize(self) -> None:
        """Runs what was recorded and waits for the device."""
        sync(wait=True)

    def query(self) -> bool:
        """Waits as `synchronize` does, so that the answer is True."""
        sync(wait=True)
        return True

    def wait_stream(self, stream: Any) -> None:
        """Returns at once: the other stream is this one."""

    def wait_event(self, event: Any) -> None:
        """Returns at once: the event is of this stream."""

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Records an event, a new one if none is given."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """``torch.jax.Event``: a point in the device's only stream.

    With `enable_timing`, `record` runs what was recorded and waits for the device, which ends the step's program there:
    between two such events lies the time of the work that was recorded between them.

    Args:
        enable_timing: whether `elapsed_time` is wanted.
        blocking: without effect.
        interprocess: must be False.

    Raises:
        ValueError: `interprocess`: no other process can wait for the device.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        if interprocess:
            raise ValueError(
                "torch.jax.Event(interprocess=True): expected False, because another process cannot wait for this "
                "process's device"
            )
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

    def wait(self, stream: Any = None) -> None:
        """Returns at once: what is recorded later runs later."""

    def synchronize(self) -> None:
        """Runs what was recorded, also after the event, and waits for the device."""
        sync(wait=True)

    def query(self) -> bool:
        """Waits as `synchronize` does, so that the answer is True."""
        sync(wait=True)
        return True

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
