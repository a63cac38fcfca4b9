"""Read a tensor's value without waiting for it: the copy to the host starts when the value is dispatched."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from xla_amp.lazy.base.dtypes import to_torch
from xla_amp.lazy.graph.trace import Buffer, Poisoned, trace
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.tensors import tensor_io


class Read:
    """The value that a tensor has now; `read_later` makes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._array: Any = None
        self._buffer: Buffer | None = None
        with trace.lock:
            buffer = tensor_io.buffer_of(tensor)
            if tuple(tensor.shape) != buffer.spec.shape or tensor.dtype is not buffer.spec.dtype:
                raise ValueError(f"read_later expects a whole tensor, got a view of {buffer.spec}")
            self._buffer = buffer
            if buffer.number < 0:
                self._take()
            else:
                trace.waiting.append(self)

    def _take(self) -> None:
        """Starts the copy; the caller holds the trace's lock."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.array is None or isinstance(buffer.array, Poisoned):
            return
        # Held for as long as the tensor has it: whether this read is still held must not make another program.
        self._array = buffer.external = buffer.array
        self._array.copy_to_host_async()

    def ready(self) -> bool:
        """Whether `value` returns at once."""
        return self._array is not None and bool(self._array.is_ready())

    def value(self) -> torch.Tensor | None:
        """The value on the CPU; None if the step that was to compute it failed.  Waits unless it is `ready`."""
        with trace.lock:
            if self._buffer is not None and self._buffer.number >= 0:  # else another thread's trace has run
                execute.flush()
        if self._array is None:
            return None
        if not self._array.is_ready():
            metrics.host_waits()
        metrics.device_to_host += 1
        return to_torch(np.array(self._array, copy=True))


def read_later(tensor: torch.Tensor) -> Read:
    """Starts to read `tensor`, a whole storage on the device, without waiting; records nothing."""
    return Read(tensor)


def _take_all() -> None:
    while trace.waiting:
        trace.waiting.pop()._take()


execute.program_ran.subscribe(_take_all)
