"""Optimizers whose step can be skipped on the device: `torch.optim`'s SGD, Adam and AdamW with the same arguments.

They run torch's fused kernels, which take as tensors `grad_scale` (the divisor of gradients) and `found_inf` (a nonzero
value skips the step).  A scaler sets both as attributes (torch's contract for optimizers with
``_step_supports_amp_scaling``, which our scaler and torch's follow); without a scaler, ``step(found_inf=...)`` takes
the flag.  Step counts are tensors on the device.  A skipped step leaves parameters, state and counts bitwise unchanged,
even if it is the first.  `wrap` gives any other optimizer the same step, by selecting old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from xla_amp.common import arguments
from xla_amp.engines import base, devices
from xla_amp.pytorch.optim.wrap import flag_of, step_unless
from xla_amp.pytorch.optim.wrap import wrap as wrap

__all__ = ["SGD", "Adam", "AdamW", "wrap"]

_Loss = TypeVar("_Loss")


class _Scaling(NamedTuple):
    """A scaler's tensors for one step."""

    grad_scale: Tensor | None
    found_inf: Tensor | None
    """float32 (): 0 or 1, because torch's CPU kernels test for 1, and step counts are corrected by subtracting it."""

    def on(self, device: torch.device) -> _Scaling:
        scale, flag = self
        return _Scaling(
            None if scale is None else scale.to(device, non_blocking=True),
            None if flag is None else flag.to(device, non_blocking=True),
        )


class _SyncFree(Optimizer):
    """Common base: the step around `_step_group`, and checkpoints that torch.optim's classes can load."""

    _step_supports_amp_scaling = True
    numbers_are_inputs = True
    """Tells captured steps that its floats go to the fused kernels as they are, as inputs of the program."""
    # A scaler sets and deletes these two. torch's scaler reads `grad_scale` with a default, so it must not be None.
    grad_scale: Tensor
    found_inf: Tensor

    @overload
    def step(self, closure: None = None, *, found_inf: Tensor | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], _Loss], *, found_inf: Tensor | None = None) -> _Loss: ...
    def step(self, closure: Callable[[], Any] | None = None, *, found_inf: Tensor | None = None) -> Any:
        """One step; skipped where `found_inf` is not zero.

        Args:
            closure: evaluates the model again and returns the loss.
            found_inf: one number on any device, e.g. from `torch.isfinite`; combined with the scaler's flag.  A nonzero
                value in one of the processes that train together skips the step in all of them.

        Returns:
            The result of `closure`.

        Raises:
            RuntimeError: a gradient is sparse, or a parameter is not floating.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            scaling = _Scaling(getattr(self, "grad_scale", None), flag_of(self, found_inf))
            for group in self.param_groups:
                for device, parameters, gradients in _by_device_and_dtype(self, group):
                    if devices.is_xla(device.type):
                        devices.engine()  # registers the fused kernels if the engine was not used before
                    self._step_group(group, parameters, gradients, scaling.on(device))
        return loss

    def _step_group(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], scaling: _Scaling
    ) -> None:
        raise TypeError(f"{type(self).__name__} is a base class; use syncfree.SGD, Adam or AdamW")

    def _make_states(self, parameters: list[Tensor], *names: str) -> None:
        """Makes state of zeros that parameters lack; ``step`` is a count, float32 ()."""
        lacking = [(p, name) for name in names for p in parameters if self.state[p].get(name) is None]
        count = torch.empty((), dtype=torch.float32, device="meta")
        made = base.zeros_like([count if name == "step" else p for p, name in lacking], parameters[0].device)
        for (parameter, name), zeros in zip(lacking, made, strict=True):
            self.state[parameter][name] = zeros

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this class or of torch.optim's class of the same name.

        Options of the groups are loaded too, but the step stays fused, and step counts go to the device.
        """
        groups = [{**group, **_FUSED} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(_FUSED)


# torch.optim's group options for fused kernels, so that a checkpoint loaded there also uses them.
_FUSED: Mapping[str, Any] = {"fused": True, "foreach": None, "differentiable": False}


class _Fused(Optimizer):
    """Last base: torch's class gives it the options that it has checked, and the groups get those of fused kernels."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        name = type(self).__name__
        arguments.require(f"syncfree.{name}(params)", params, Iterable, "parameters such as model.parameters()")
        if defaults["differentiable"]:
            raise RuntimeError(
                f"syncfree.{name}(differentiable=True): its step runs a fused kernel, through which there is no "
                f"gradient; use torch.optim.{name}"
            )
        if defaults["fused"] is False:
            raise RuntimeError(
                f"syncfree.{name}(fused=False): skipping on the device needs the fused kernels; leave fused out, or "
                f"use torch.optim.{name}"
            )
        super().__init__(params, {**defaults, **_FUSED})


class SGD(_SyncFree, torch.optim.SGD, _Fused):
    """`torch.optim.SGD` with a step that can be skipped on the device.

    Arguments are `torch.optim.SGD`'s; `foreach` has no effect, since one kernel steps all parameters.  As in torch,
    `maximize` negates the gradient before weight decay is added.  Momentum with `dampening` is torch's step, as `wrap`
    makes it: torch dampens from the second step on, so the host reads the flag until a step is not skipped.

    Raises:
        ValueError: an option out of its range.
        RuntimeError: `differentiable` or ``fused=False`` was passed.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = SGD([weight], lr=0.5)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step(found_inf=torch.tensor(1.0))
        >>> weight.tolist()
        [1.0, 1.0]
    """

    steps_as = torch.optim.SGD
    """Tells `xla_amp.training` whose step it has where momentum is dampened."""

    def step(self, closure: Callable[[], Any] | None = None, *, found_inf: Tensor | None = None) -> Any:
        """As `_SyncFree.step`."""
        if not any(group["momentum"] and group["dampening"] for group in self.param_groups):
            return super().step(closure, found_inf=found_inf)
        return step_unless(self, self._dampened, closure, flag_of(self, found_inf))

    def _dampened(self) -> None:
        step: Any = torch.optim.SGD.step
        for group in self.param_groups:
            group["fused"] = False  # which expects that momentum begins for all parameters at once
        try:
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(self)
        finally:
            for group in self.param_groups:
                group["fused"] = True

    def _step_group(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], scaling: _Scaling
    ) -> None:
        momentum = group["momentum"]
        if momentum:
            self._make_states(parameters, "momentum_buffer")
        torch._fused_sgd_(
            parameters,
            gradients,
            [self.state[parameter]["momentum_buffer"] for parameter in parameters] if momentum else [],
            weight_decay=float(group["weight_decay"]),
            momentum=momentum,
            lr=_number(group["lr"], parameters[0].device),
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            # Buffers start as zeros. With `is_first_step` the host would have to know whether the first step was
            # skipped.
            is_first_step=False,
            grad_scale=scaling.grad_scale,
            found_inf=scaling.found_inf,
        )


class Adam(_SyncFree, torch.optim.Adam, _Fused):
    """`torch.optim.Adam` with a step that can be skipped on the device.

    Arguments are `torch.optim.Adam`'s; `capturable` and `foreach` have no effect: step counts are always on the device,
    and one kernel steps all parameters.

    Raises:
        ValueError: an option out of its range.
        RuntimeError: `differentiable` or ``fused=False`` was passed.
    """

    def _step_group(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], scaling: _Scaling
    ) -> None:
        amsgrad = group["amsgrad"]
        self._make_states(parameters, "step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        # torch's kernels take the count with this step included, and do not undo it when the step is skipped.
        torch._foreach_add_(steps, 1)
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        kernel(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if amsgrad else [],
            steps,
            amsgrad=amsgrad,
            lr=_number(group["lr"], parameters[0].device),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=scaling.grad_scale,
            found_inf=scaling.found_inf,
        )
        if scaling.found_inf is not None:
            torch._foreach_sub_(steps, [scaling.found_inf] * len(steps))


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` (Loshchilov and Hutter 2019, decoupled weight decay), skippable on the device.

    Arguments are `torch.optim.AdamW`'s; otherwise as `Adam`.
    """


def _by_device_and_dtype(
    optimizer: Optimizer, group: dict[str, Any]
) -> Iterator[tuple[torch.device, list[Tensor], list[Tensor]]]:
    """The group's parameters with a gradient, and these gradients, by device and dtype, as fused kernels take them."""
    name = type(optimizer).__name__
    found: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            raise RuntimeError(
                f"syncfree.{name}: a gradient is sparse (parameter {tuple(parameter.shape)}), and the fused kernels "
                "take dense ones; pass sparse=False to the embedding, or use torch.optim.SGD or torch.optim.SparseAdam"
            )
        if not parameter.is_floating_point():
            raise RuntimeError(
                f"syncfree.{name}: expected floating parameters, got {parameter.dtype} (parameter "
                f"{tuple(parameter.shape)}); use torch.optim.{name}"
            )
        parameters, gradients = found.setdefault((parameter.device, parameter.dtype), ([], []))
        parameters.append(parameter)
        gradients.append(gradient)
    for (device, _), (parameters, gradients) in found.items():
        yield device, parameters, gradients


def _number(value: float | Tensor, device: torch.device) -> Any:
    """A learning rate for the fused kernels: a number, or a tensor on the parameters' device."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.device == device:
        return value.reshape(())
    return float(value) if value.device.type == "cpu" else value.to(device).reshape(())
