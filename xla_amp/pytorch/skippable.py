"""`wrap`: any optimizer with a step that can be skipped on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from xla_amp.pytorch import devices
from xla_amp.pytorch.selecting import step_where_finite

_AnyOptimizer = TypeVar("_AnyOptimizer", bound=Optimizer)


def wrap(optimizer: _AnyOptimizer) -> _AnyOptimizer:
    """Gives `optimizer` a ``step(closure=None, *, found_inf=None)`` that can be skipped, with and without a scaler.

    The same object is returned, with a class derived from its own.  On an XLA device the step runs in any case and old
    values are selected where `found_inf` is not zero; on other devices the flag is read first, as torch's scaler does.

    Raises:
        TypeError: no `torch.optim.Optimizer`.
        ValueError: something has replaced the `step` of this object, as learning-rate schedulers do.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = wrap(torch.optim.RMSprop([weight]))
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step(found_inf=torch.tensor(1.0))
        >>> weight.tolist()
        [1.0, 1.0]
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"wrap() expects a torch.optim.Optimizer, got {optimizer!r} ({type(optimizer).__name__})")
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return optimizer  # takes part already: fused, one of ours, or wrapped before
    if "step" in vars(optimizer):
        raise ValueError(
            f"wrap({type(optimizer).__name__}): its `step` has been replaced on the object, as learning-rate "
            "schedulers do; wrap the optimizer first and give the scheduler what wrap() returns"
        )
    optimizer.__class__ = _class(type(optimizer))  # type: ignore[assignment, arg-type]  # it is a subclass
    return optimizer


class _Skippable(Optimizer):
    """Comes before an optimizer's own class."""

    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None, *, found_inf: Tensor | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flag = flag_of(getattr(self, "found_inf", None), found_inf)
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            _divide(self, scale)
        step = super().step
        if flag is None or (not devices.is_xla(flag.device.type) and not flag.item()):
            step()
        elif devices.is_xla(flag.device.type):
            step_where_finite(self, flag, step)
        return loss

    def __reduce__(self) -> Any:
        return _again, (type(self).__mro__[2], self.__getstate__())


@functools.cache
def _class(plain: type[Optimizer]) -> type[Optimizer]:
    return type(f"Skippable{plain.__name__}", (_Skippable, plain), {"__doc__": plain.__doc__})


def _again(plain: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    made: Optimizer = plain.__new__(plain)
    made.__setstate__(state)
    return wrap(made)


@torch.no_grad()
def _divide(optimizer: Optimizer, scale: Tensor) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(scale.to(parameter.device))


def flag_of(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """float32 (): 1 where one of the flags is not zero, else 0; None without flags."""
    flag = one if other is None else other
    if flag is None:
        return None
    if one is not None and other is not None:
        flag = one + other.to(one.device)
    return (flag.reshape(()) != 0).to(torch.float32)
