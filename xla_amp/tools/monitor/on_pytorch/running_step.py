"""One step of a monitored loop: what it computes on, and its numbers on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from xla_amp.backends import base, devices
from xla_amp.common.types import Dtype
from xla_amp.errors import XlaAmpError
from xla_amp.tools.monitor.history import Statistics, StepRecord, Sums, ValueKey
from xla_amp.tools.monitor.on_pytorch.kept_step import Before


class StepCountError(XlaAmpError, RuntimeError):
    """Blocks of ``monitor.step`` that do not hold one optimizer step each."""


class OnDevice(NamedTuple):
    """What the device has recorded of a step."""

    status: torch.Tensor
    """float32 (names)."""
    names: tuple[str, ...]
    """What the numbers of `status` are: ``step``, which the device counts from 0, ``skipped``, ``local`` (whether this
    process itself made an inf or NaN), ``gradient_norm`` and ``loss_scale``."""
    row: torch.Tensor
    """float32 (keys, fields): sums."""
    keys: Sequence[ValueKey]
    low: Dtype
    """The low dtype that the sums refer to."""


class MonitoredStep:
    """One step while it runs; ``with monitor.step(...) as step`` gives it."""

    def __init__(self, number: int, count: int, kept: Before | None, sampled: bool) -> None:
        self.sampled = sampled
        self.kept = kept
        """What a replay needs, if a bad step would be kept."""
        self.loss: torch.Tensor | float | None = None
        """Set it to the step's loss, () or with one element; it is read later, without waiting."""
        self.local = False
        """Whether this process itself made an inf or NaN; known once the step was read."""
        self._number, self._count = number, count
        self._reads: dict[str, base.Read] = {}

    def end(self, recorded: OnDevice) -> None:
        """Starts to read the loss and what the device has recorded."""
        self._names, self._keys, self._low = recorded.names, recorded.keys, recorded.low
        self._reads["status"] = read_later(recorded.status)
        if self.sampled and recorded.keys:
            self._reads["row"] = read_later(recorded.row)
        loss, self.loss = self.loss, None
        try:
            if isinstance(loss, torch.Tensor):
                self._reads["loss"] = read_later(loss.detach())
                loss = None
        except ValueError:  # a view: only its storage can be read without recording
            pass
        self._loss = None if loss is None else float(loss)

    def ready(self) -> bool:
        """Whether `record` does not wait."""
        return all(read.ready() for read in self._reads.values())

    def record(self) -> tuple[StepRecord, Dtype] | None:
        """The record of the step, and the low dtype of its statistics; None if the step failed.

        Raises:
            StepCountError: the device has counted other steps than the host.
        """
        status, row, loss = (self._reads[name].value() if name in self._reads else None for name in _READ)
        if status is None:
            return None
        numbers = dict(zip(self._names, status.tolist(), strict=True))
        if numbers["step"] != self._count:
            raise StepCountError(
                f"monitor: {self._count + 1} `with monitor.step(...)` blocks or steps of the optimizer have ended, and "
                f"the device counts {int(numbers['step']) + 1} steps: put one optimizer step, with all its "
                "micro-batches, into one block"
            )
        scale = numbers.get("loss_scale")
        sums = {} if row is None else {key: Sums(*line) for key, line in zip(self._keys, row.tolist(), strict=True)}
        self.local = bool(numbers["local"])
        record = StepRecord(
            step=self._number,
            loss=self._loss if loss is None else float(loss.reshape(())),
            loss_scale=scale,
            skipped=bool(numbers["skipped"]),
            gradient_norm=numbers.get("gradient_norm"),
            statistics=Statistics.of_layers(sums, self._low, scale),
        )
        return record, self._low


_READ = ("status", "row", "loss")


class _Copy:
    """A copy that a CUDA device makes behind what it has been given, or that is on the CPU already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._value = tensor.detach().to("cpu", copy=True)

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def value(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._value


def read_later(tensor: torch.Tensor) -> base.Read:
    """Starts to read `tensor`; on devices other than XLA's and CUDA's this waits."""
    tensor = tensor.detach()
    return devices.engine().read_later(tensor) if devices.is_xla(tensor.device.type) else _Copy(tensor)
