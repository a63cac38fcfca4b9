"""`xla_amp.monitor` for transformers' Trainer."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import TrainerCallback

from xla_amp.tools.monitor.on_pytorch import Monitor, RunningStep, monitor


class MonitorCallback(TrainerCallback):
    """`xla_amp.monitor` of the trained model, its optimizer and its scaler; a batch is the arguments of the model.

    Args:
        options: arguments of `xla_amp.monitor` by name, as ``directory`` and ``sinks``.

    `monitor` is the `Monitor` once training has started.

    Example:
        Trainer(model, arguments, train_dataset=data, callbacks=[MonitorCallback(directory="runs/1")])
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.monitor: Monitor | None = None
        self._block: contextlib.ExitStack | None = None
        self._step: RunningStep | None = None
        self._handles: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begins a step; the first one starts the monitor."""
        if self.monitor is None:
            model, optimizer = given["model"], given["optimizer"]
            scaler = getattr(optimizer, "scaler", None)  # Accelerate's wrapper has both
            optimizer = getattr(optimizer, "optimizer", optimizer)
            self.monitor = monitor(model, optimizer, scaler, **self.options)
            self._handles = [
                model.register_forward_pre_hook(self._before, with_kwargs=True),
                model.register_forward_hook(self._after),
            ]
        self._block = contextlib.ExitStack()
        self._step = self._block.enter_context(self.monitor.step())
        self._parts = args.gradient_accumulation_steps

    def _before(self, model: Any, args: Any, kwargs: Any) -> None:
        if self._step is not None and model.training:
            self._step.batch = (*self._step.batch, dict(kwargs) or args)

    def _after(self, model: Any, args: Any, output: Any) -> None:
        loss = getattr(output, "loss", None)
        if self._step is not None and loss is not None and model.training:
            part = loss.detach() / self._parts
            self._step.loss = part if self._step.loss is None else self._step.loss + part

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Ends the step."""
        block, self._block, self._step = self._block, None, None
        if block is not None:
            block.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Reads what is left, and removes the hooks."""
        for handle in self._handles:
            handle.remove()
        if self.monitor is not None:
            self.monitor.close()
