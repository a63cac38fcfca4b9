"""The device's half of a monitor in PyTorch: what hooks add to the step's own program.

They write into two tensors on the device, so a step costs no executable and no wait, also in a captured step, whose
replays run no Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_amp.backends import base, devices, module_paths
from xla_amp.backends.trees import tree_leaves
from xla_amp.tools.monitor.history import StepRecord

_NUMBERS = ("count", "skipped", "loss_scale", "gradient_norm")
"""What `DeviceNumbers.status` begins with; ``count`` is the number of the step, from 1."""


class DeviceNumbers:
    """The numbers of the step of `optimizer` that runs; modules at the paths `layers` call `layer`."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[str],
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        device: torch.device,
    ) -> None:
        self.counts = False
        """Whether a step runs; outside of steps nothing is recorded."""
        self.ended = 0
        """Optimizer steps that hooks have seen; a replay of a captured step runs no hooks."""
        self._model, self._layers, self._optimizer, self._scaler = model, layers, optimizer, scaler
        self._device = device
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parameters = {
            names.get(id(p), f"parameter {number} of the optimizer"): p for number, p in enumerate(parameters)
        }
        self._returned: dict[str, None] = {}
        """Layers in the order in which they have returned."""
        self._pass: dict[str, torch.Tensor] = {}
        """Layer -> largest magnitude in the forward passes that run."""
        self._newest: weakref.ref[torch.Tensor] | None = None
        self._has_closure = False
        sizes = len(_NUMBERS) + len(parameters) + len(layers), len(layers)
        # Made outside of the step, so that the first step is the program of the next ones.
        self.status, self._largest = base.zeros_like([torch.empty(size, device="meta") for size in sizes], device)

    def layer(self, path: str, module: Any, inputs: Any, output: object) -> None:
        """The layer at `path` has returned `output`."""
        if not (self.counts and self._model.training and torch.is_grad_enabled()):
            return
        if module_paths.in_backward():
            return  # in a backward pass checkpointing computes again what was seen in the forward pass
        tensors = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor) and each.is_floating_point()]
        tensors = [each for each in tensors if each.layout is torch.strided and each.numel()]
        if self._newest is not None and tensors and tensors[-1] is self._newest():
            tensors.pop()  # a container returns what its last part has returned
        if tensors:
            self._newest = weakref.ref(tensors[-1])
            with torch.no_grad():
                found = [self._number(each.detach().abs().max()) for each in tensors]
                found += [self._pass[path]] if path in self._pass else []
                self._pass[path] = torch.stack(found).max() if len(found) > 1 else found[0]
            self._returned[path] = None

    @torch.no_grad()
    def fold(self, *_: Any) -> None:
        """Adds the forward passes since the last call to the step's numbers."""
        found, self._pass, self._newest = self._pass, {}, None
        if found:
            new = torch.stack([found.get(path, self._number(0.0)) for path in self._layers])
            self._largest.copy_(torch.maximum(self._largest, new))

    @torch.no_grad()
    def before_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The optimizer's step begins, with these arguments."""
        if not self.counts:
            return
        self._has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if not self._has_closure:
            self._take_gradients()

    @torch.no_grad()
    def after_step(self, *_: Any) -> None:
        """The optimizer's step has ended."""
        if not self.counts:
            return
        self.ended += 1
        if self._has_closure:  # only now are there the gradients that it has used
            self._take_gradients()
        self._end(self._found_inf(), None if self._scaler is None else self._scaler._scale)

    @torch.no_grad()
    def step_was_left_out(self, scale: torch.Tensor | None) -> None:
        """torch's scaler did not call the optimizer, because gradients were not finite, and has changed its `scale`."""
        self._take_gradients()
        self._end(torch.ones(()), scale)

    def loss_scale(self) -> torch.Tensor | None:
        """float32 (): a copy of the scale as a step begins; None where the scaler does not leave steps out."""
        if self._scaler is None or devices.is_xla(self._device.type):
            return None
        scale = self._scaler._scale  # None until the first loss is scaled
        return torch.tensor(self._scaler.get_scale()) if scale is None else scale.detach().clone()

    def _take_gradients(self) -> None:
        """Norm of all gradients, and for each parameter whether that of its gradient is not finite."""
        norms = []
        for parameter in self._parameters.values():
            gradient = torch.zeros((1,), device=parameter.device) if parameter.grad is None else parameter.grad.detach()
            values = torch.ops.aten._values(gradient) if gradient.is_sparse else gradient
            norms.append(self._number(torch.linalg.vector_norm(values, dtype=torch.float32)))
        together = torch.stack(norms)
        scaled = getattr(self._optimizer, "grad_scale", None)  # fused optimizers unscale by themselves
        norm = torch.linalg.vector_norm(together)
        self._gradients = (norm if scaled is None else norm / self._number(scaled)), (~together.isfinite()).float()

    def _end(self, skipped: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        self.fold()
        norm, bad = self._gradients
        numbers = torch.stack([self.status[0] + 1, self._number(skipped), self._number(scale), norm])
        self.status.copy_(torch.cat([numbers, bad, self._largest]))
        self._largest.zero_()

    def _found_inf(self) -> torch.Tensor | None:
        state = {} if self._scaler is None else self._scaler._per_optimizer_states.get(id(self._optimizer), {})
        found = list(state.get("found_inf_per_device", {}).values())
        total: torch.Tensor | None = sum(found[1:], found[0]) if found else getattr(self._optimizer, "found_inf", None)
        return total

    def _number(self, value: torch.Tensor | float | None) -> torch.Tensor:
        """float32 () on the model's first device."""
        if isinstance(value, torch.Tensor):
            return value.reshape(()).to(self._device, torch.float32)
        return torch.zeros((), device=self._device)

    def record(self, status: Sequence[float], step: int, loss: float | None) -> StepRecord:
        """The record of a step whose `status` has arrived."""
        layers = len(status) - len(self._layers)
        given = *_NUMBERS, *(f"nonfinite/{name}" for name in self._parameters)
        numbers = dict(zip(given, status[:layers], strict=True))
        if self._scaler is None:
            del numbers["loss_scale"]
        largest = dict(zip(self._layers, status[layers:], strict=True))
        return StepRecord.of(step, numbers | {f"largest/{path}": largest[path] for path in self._returned}, loss)

    @torch.no_grad()
    def drop(self) -> None:
        """Forgets a step that failed."""
        self._pass, self._newest = {}, None
        self._largest.zero_()
