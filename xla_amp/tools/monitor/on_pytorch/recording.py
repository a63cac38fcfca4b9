"""The device's half of a monitor: what hooks add to the step's own program.

State on the device are the sums over the activations of the step so far, the numbers and sums of the last step, and the
number of steps.  Hooks write them, so a step with statistics costs no executable and no wait, also in a captured step,
whose replays run no Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_amp.backends import devices
from xla_amp.common.types import RANGES, Dtype
from xla_amp.tools.monitor.on_pytorch import columns
from xla_amp.tools.monitor.on_pytorch.activations import Activations, zeros
from xla_amp.tools.monitor.on_pytorch.parameters import Parameters, gradient_norm
from xla_amp.tools.monitor.on_pytorch.running_step import OnDevice
from xla_amp.tools.monitor.on_pytorch.statistics import FIELDS
from xla_amp.tools.monitor.run import Options


class StatisticsRecording:
    """Records the statistics of the step that runs; its methods from `enter` to `after_step` are called by hooks.

    Args:
        model: what is watched.
        modules: path -> module of the layers.
        optimizer: its step ends a step; None: a forward pass does.
        scaler: an enabled one, or None.
        options: of the monitor.
        device: of the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        modules: dict[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        options: Options,
        device: torch.device,
    ) -> None:
        self.low: Dtype | None = options.low
        """None until a forward pass tells it."""
        self.sampled = True
        """Whether this step computes statistics."""
        self.counts = True
        """Whether forward passes belong to a step now."""
        self._model, self._optimizer, self._scaler, self._device = model, optimizer, scaler, device
        self._inside = False
        owned = {} if optimizer is None else columns.parameters_of(modules, optimizer)
        self._activations = Activations(modules if "activation" in options.kinds else (), device)
        self._parameters = Parameters(owned, tuple(options.kinds), device)
        self._names: tuple[str, ...] = ("step", "skipped", "local")
        self._names += ("gradient_norm",) if optimizer is not None else ()
        self._names += ("loss_scale",) if scaler is not None else ()
        lines = len(self._activations.keys()) + len(self._parameters.keys())
        self._status, self._row = zeros([(len(self._names),), (lines, FIELDS)], torch.float32, device)
        [self._steps] = zeros([(1,)], torch.int64, device)
        self._norm = torch.zeros(())
        self._closure = False
        self._local: list[torch.Tensor] = []
        """For each gradient that a backward pass has made: whether it is finite."""

    # -- forward ---------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """The model's forward pass begins."""
        self._inside = self.counts and self._model.training and torch.is_grad_enabled() and not _in_backward()
        if self.low is None and self._inside:
            self.low = _autocast_dtype(self._device.type)

    def layer(self, path: str, output: Any) -> None:
        """The layer at `path` has returned `output`; it may be called without the model."""
        if _in_backward() or not self._records():
            return  # a part that checkpointing runs again was counted in its forward pass
        tensors = self._activations.new(output)
        if tensors:
            if self.low is None:
                self.low = _autocast_dtype(self._device.type) or _name(tensors[0].dtype)
            self._activations.add(path, tensors, self._zero)

    def _records(self) -> bool:
        """Whether statistics of a forward pass are recorded now."""
        return self.sampled and self.counts and self._model.training and (self._inside or torch.is_grad_enabled())

    @torch.no_grad()
    def leave(self) -> bool:
        """The model's forward pass has ended; returns whether a step ends with it."""
        ended, self._inside = self._inside, False
        if ended:
            self._activations.fold()
            if self._optimizer is None:
                self.end_step()
        return ended and self._optimizer is None

    # -- backward and update ---------------------------------------------------------------------------------------

    def gradient(self, parameter: torch.Tensor) -> None:
        """A backward pass has added to a gradient of this process."""
        if parameter.grad is not None and not parameter.grad.is_sparse:
            self._local.append(torch.isfinite(parameter.grad).all())

    @torch.no_grad()
    def before_step(self, arguments: Sequence[Any] = ()) -> None:
        """The optimizer's step begins, with `arguments`."""
        self._activations.fold()
        self._closure = any(map(callable, arguments))
        if not self._closure:
            self._take_gradients()
        if self.sampled:
            self._parameters.add_weights(self._zero)

    @torch.no_grad()
    def after_step(self) -> None:
        """The optimizer's step has ended."""
        if self._closure:  # only now are there the gradients that it has used
            self._activations.fold()
            self._take_gradients()
        self.end_step()

    def loss_scale(self) -> torch.Tensor | None:
        """float32 (): a copy of the scale at the beginning of a step; None on a lazy device, where each step ends."""
        if self._scaler is None or devices.is_xla(self._device.type):
            return None
        if self._scaler._scale is None:  # until the first loss is scaled
            return torch.tensor(self._scaler.get_scale())
        return self._scaler._scale.detach().clone()

    @torch.no_grad()
    def step_was_left_out(self, scale: torch.Tensor | None) -> None:
        """torch's scaler did not call the optimizer, because gradients were not finite, and has changed its `scale`."""
        self.before_step()
        self.end_step(torch.ones((), device=self._device), scale)

    def _take_gradients(self) -> None:
        if self._optimizer is None:
            return
        scaled = getattr(self._optimizer, "grad_scale", None)  # fused optimizers unscale by themselves
        unscale = None if scaled is None else scaled.reshape(()).reciprocal()
        self._norm = gradient_norm(self._optimizer, unscale, self._device)
        if self.sampled:
            scale = None if self._scaler is None else self._scaler._scale
            self._parameters.add_gradients(self._zero, unscale, scale)

    def end_step(self, skipped: torch.Tensor | None = None, scale: torch.Tensor | None = None) -> None:
        """Stores the numbers of the step, and its sums if it is sampled."""
        nothing = torch.zeros((), device=self._device)
        skipped = self._found_inf() if skipped is None else skipped
        skipped = nothing if skipped is None else skipped.reshape(()).to(torch.float32)
        finite, self._local = self._local, []
        local = (~torch.stack(finite).all()).to(torch.float32) if finite else nothing
        numbers = [self._steps.to(torch.float32).reshape(()), skipped, local]
        if self._optimizer is not None:
            numbers.append(self._norm)
        if self._scaler is not None:
            scale = self._scaler._scale if scale is None else scale
            numbers.append(nothing if scale is None else scale.reshape(()).to(self._device, torch.float32))
        self._status.copy_(torch.stack(numbers))
        self._steps.add_(1)
        if self.sampled and len(self._row):
            self._parameters.add_updates(self._zero, skipped)
            self._row.copy_(torch.cat([self._activations.sums, *self._parameters.sums()]))
            self._activations.begin_step()

    def _found_inf(self) -> torch.Tensor | None:
        if self._scaler is not None:
            state = self._scaler._per_optimizer_states.get(id(self._optimizer))
            found = list(state["found_inf_per_device"].values()) if state else []
            if found:
                total: torch.Tensor = sum(found[1:], found[0])
                return total
        found_inf: torch.Tensor | None = getattr(self._optimizer, "found_inf", None)
        return found_inf

    # -- for the host ----------------------------------------------------------------------------------------------

    def recorded(self) -> OnDevice:
        """What the device has recorded of the last step."""
        keys = [*self._activations.keys(), *self._parameters.keys()]
        return OnDevice(self._status, self._names, self._row, keys, self._low)

    def drop(self) -> None:
        """Forgets a step that failed."""
        self._inside = False
        self._local.clear()
        self._activations.drop()

    @property
    def _low(self) -> Dtype:
        return self.low or "float32"

    @property
    def _zero(self) -> float:
        return RANGES[self._low].zero


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _autocast_dtype(device_type: str) -> Dtype | None:
    return _name(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else None


def _name(dtype: torch.dtype) -> Dtype:
    return str(dtype).removeprefix("torch.")  # type: ignore[return-value]
