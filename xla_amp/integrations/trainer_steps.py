"""`xla_amp.monitor` in trainers that call hooks: what the callbacks for Lightning and for transformers share."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from xla_amp.tools.monitor.on_pytorch import Monitor, RunningStep, monitor


class TrainerSteps:
    """Records each optimizer step of a trainer, with its batches and its loss; before a base class of the framework.

    Args:
        options: arguments of `xla_amp.monitor` by name, as ``directory`` and ``sinks``.
    """

    monitor: Monitor | None = None
    """Once training has started."""
    _step: RunningStep | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self._block = options, contextlib.ExitStack()

    def _start(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Monitor:
        self.monitor = monitor(model, optimizer, scaler, **self.options)
        return self.monitor

    def _begin(self) -> None:
        if self.monitor is not None:
            self._step = self._block.enter_context(self.monitor.step())

    def _add(self, batch: tuple[Any, ...], loss: torch.Tensor | None = None, parts: int = 1) -> None:
        """Adds what a micro-batch is known to have; `parts` of them make a step."""
        if self._step is not None:
            self._step.batch = (*self._step.batch, *batch)
            if loss is not None:
                before = self._step.loss
                self._step.loss = loss / parts if before is None else before + loss / parts

    def _end(self) -> None:
        self._step = None
        self._block.close()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Reads what is left, and removes the monitor's hooks."""
        if self.monitor is not None:
            self.monitor.close()
