"""`xla_amp.monitor` in trainers that call hooks: what the callbacks for Lightning and for transformers share."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from xla_amp.tools.monitor.on_pytorch import Monitor, RunningStep, monitor


class TrainerSteps:
    """Records each optimizer step of a trainer, with its loss; before a base class of the framework.

    Args:
        options: arguments of `xla_amp.monitor` by name, as ``sinks``.
    """

    monitor: Monitor
    """Of the last training that has started."""
    _trains = False
    _step: RunningStep | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self._block = options, contextlib.ExitStack()

    def _begin(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """Begins a step; the first one of a training starts the monitor."""
        if not self._trains:
            self.monitor, self._trains = monitor(model, optimizer, scaler, **self.options), True
        self._step = self._block.enter_context(self.monitor.step())

    def _add(self, loss: torch.Tensor | None, parts: int) -> None:
        """Adds the loss of a micro-batch; `parts` of them make a step."""
        if self._step is not None and loss is not None:
            self._step.loss = loss.detach() / parts + (0 if self._step.loss is None else self._step.loss)

    def _end(self) -> None:
        self._step = None
        self._block.close()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Reads what is left, and removes the hooks."""
        if self._trains:
            self.monitor.close()
            self._trains = False
