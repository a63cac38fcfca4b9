"""One step of a monitored loop: what it computes on, and its numbers on their way to the host."""

from __future__ import annotations

from typing import Any

import torch

from xla_amp.backends import base
from xla_amp.tools.monitor.on_pytorch import kept_step, reads


class Step:
    """One step while it runs; ``with monitor.step(...) as step`` gives it."""

    def __init__(self, number: int, batch: Any, before: kept_step.Before | None, sampled: bool) -> None:
        self.number = number
        self.sampled = sampled
        self.loss: torch.Tensor | float | None = None
        """Set it to the step's loss, () or with one element; it is read later, without waiting."""
        self.batch = batch
        self.before = before
        self._status: base.Read | None = None
        self._loss: Any = None

    def end(self, status: torch.Tensor) -> None:
        """Starts to read the loss and `status`."""
        self._status = reads.read_later(status)
        loss, self.loss = self.loss, None
        if isinstance(loss, torch.Tensor):
            self._loss = _read_number(loss.detach())
        elif loss is not None:
            self._loss = float(loss)

    def ready(self) -> bool:
        """Whether `read` does not wait."""
        parts = (self._status, self._loss)
        return all(part.ready() for part in parts if isinstance(part, base.Read))

    def read(self) -> tuple[float | None, list[float]] | None:
        """The loss, and the numbers of `recording.STATUS`; None if the step failed."""
        value = self._status.value() if self._status is not None else None
        if value is None:
            return None
        loss = self._loss
        if isinstance(loss, base.Read):
            found = loss.value()
            loss = None if found is None else float(found.reshape(()))
        return loss, value.tolist()


def _read_number(tensor: torch.Tensor) -> base.Read | float:
    try:
        return reads.read_later(tensor)
    except ValueError:  # a view: only its storage can be read without recording
        return float(tensor)
