"""`xla_amp.monitor` for transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from xla_amp.integrations.trainer_steps import TrainerSteps


class MonitorCallback(TrainerSteps, TrainerCallback):
    """`xla_amp.monitor` of the trained model, its optimizer and its scaler.

    Args:
        options: arguments of `xla_amp.monitor` by name, as ``sinks``.

    `monitor` is the `Monitor` of the last training that has started.

    Example:
        Trainer(model, arguments, train_dataset=data, callbacks=[MonitorCallback(sinks=[print])])
    """

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begins a step; the first one starts the monitor."""
        model, optimizer, first = given["model"], given["optimizer"], not self._trains
        # Accelerate's wrapper has the optimizer and the scaler.
        self._begin(model, getattr(optimizer, "optimizer", optimizer), getattr(optimizer, "scaler", None))
        self._parts = args.gradient_accumulation_steps
        if first:
            self.monitor._handles.append(model.register_forward_hook(self._after))

    def _after(self, model: Any, args: Any, output: Any) -> None:
        if model.training:
            self._add(getattr(output, "loss", None), self._parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Ends the step."""
        self._end()
