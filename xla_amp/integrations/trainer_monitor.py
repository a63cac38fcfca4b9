"""`xla_amp.monitor` for transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from xla_amp.integrations.trainer_steps import TrainerSteps


class MonitorCallback(TrainerSteps, TrainerCallback):
    """`xla_amp.monitor` of the trained model, its optimizer and its scaler.

    Args:
        options: arguments of `xla_amp.monitor` by name, as ``sinks``.

    `monitor` is the `Monitor` once training has started.

    Example:
        Trainer(model, arguments, train_dataset=data, callbacks=[MonitorCallback(sinks=[print])])
    """

    _handle: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begins a step; the first one starts the monitor."""
        if self.monitor is None:
            model, optimizer = given["model"], given["optimizer"]
            scaler = getattr(optimizer, "scaler", None)  # Accelerate's wrapper has both
            self._start(model, getattr(optimizer, "optimizer", optimizer), scaler)
            self._handle = model.register_forward_hook(self._after)
        self._begin()
        self._parts = args.gradient_accumulation_steps

    def _after(self, model: Any, args: Any, output: Any) -> None:
        loss = getattr(output, "loss", None)
        if loss is not None and model.training:
            self._add(loss.detach(), self._parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Ends the step."""
        self._end()

    def on_train_end(self, *args: Any, **given: Any) -> None:
        """Reads what is left, and removes the hooks."""
        if self._handle is not None:
            self._handle.remove()
        super().on_train_end()
