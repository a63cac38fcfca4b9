"""`wrap`: give any optimizer a step that can be skipped on the device."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from xla_amp.engines import devices

_AnyOptimizer = TypeVar("_AnyOptimizer", bound=Optimizer)


def wrap(optimizer: _AnyOptimizer) -> _AnyOptimizer:
    """Gives `optimizer` a ``step(closure=None, *, found_inf=None)`` that can be skipped, with and without a scaler.

    Returns the same object, with a subclass of its class.  On an XLA device the step always runs and old values are
    selected where `found_inf` is not zero; on other devices the flag is read first, as torch's scaler does.

    Raises:
        TypeError: not a `torch.optim.Optimizer`.
        ValueError: the `step` of this object was replaced, as learning-rate schedulers do.

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
        return optimizer  # supported already: fused, from syncfree, or wrapped before
    if "step" in vars(optimizer):
        raise ValueError(
            f"wrap({type(optimizer).__name__}): its `step` has been replaced on the object, as learning-rate "
            "schedulers do; wrap the optimizer first and give the scheduler what wrap() returns"
        )
    optimizer.__class__ = _class(type(optimizer))  # type: ignore[assignment, arg-type]  # it is a subclass
    return optimizer


class _Skippable(Optimizer):
    """First base of the class that `wrap` makes; the optimizer's class is the second."""

    _step_supports_amp_scaling = True
    steps_as: type[Optimizer]

    def step(self, closure: Callable[[], Any] | None = None, *, found_inf: Tensor | None = None) -> Any:
        flag = flag_of(self, found_inf)
        wanted = inspect.signature(super().step).parameters.get("closure")
        if closure is not None and wanted is not None and wanted.default is wanted.empty:
            # LBFGS, which decides on the host anyway
            return None if flag is not None and flag.item() else super().step(closure)
        return step_unless(self, super().step, closure, flag)

    # torch wraps an optimizer class's `step` in hooks, once. The hooks of the wrapped class run already.
    step.hooked = True  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        return _rebuild, (self.steps_as, self.__getstate__())


def step_unless(
    optimizer: Optimizer, step: Callable[[], Any], closure: Callable[[], Any] | None, flag: Tensor | None
) -> Any:
    """Steps an optimizer by `step`, with the scaler's divisor of gradients, unless the flag is not zero."""
    from xla_amp.training import capturable, skip_step  # only wrapped optimizers load them

    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:
        _divide(optimizer, scale)
    step = capturable.own_step(optimizer) or step
    with _without_scaling(optimizer):
        if flag is not None and devices.is_xla(flag.device.type):
            skip_step.step_where_finite(optimizer, flag, step)
        elif flag is None or not flag.item():
            step()
    return loss


@functools.cache
def _class(plain: type[Optimizer]) -> type[Optimizer]:
    return type(f"Skippable{plain.__name__}", (_Skippable, plain), {"__doc__": plain.__doc__, "steps_as": plain})


def _rebuild(plain: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    made: Optimizer = plain.__new__(plain)
    made.__setstate__(state)
    return wrap(made)


@contextlib.contextmanager
def _without_scaling(optimizer: Optimizer) -> Iterator[None]:
    """Hides the scaler's attributes, which are applied already; torch's Adafactor and Adagrad raise if they are set."""
    attributes = vars(optimizer)
    hidden: dict[str, Any] = {name: attributes.pop(name) for name in ("grad_scale", "found_inf") if name in attributes}
    try:
        yield
    finally:
        attributes.update(hidden)


@torch.no_grad()
def _divide(optimizer: Optimizer, scale: Tensor) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(scale.to(parameter.device))


@torch.no_grad()
def flag_of(optimizer: Optimizer, found_inf: Tensor | None) -> Tensor | None:
    """float32 (): 1 where the scaler's flag or `found_inf` is not zero, else 0; None without flags.

    The scaler's flag is the same in all processes that train together; `found_inf` is reduced over them.
    """
    flag: Tensor | None = getattr(optimizer, "found_inf", None)
    if found_inf is not None:
        reduced = _any_process(optimizer, found_inf)
        flag = reduced if flag is None else flag + reduced.to(flag.device)
    return None if flag is None else (flag.reshape(()) != 0).to(torch.float32)


def _any_process(optimizer: Optimizer, flag: Tensor) -> Tensor:
    """`flag`, set in every process if it is set in one, so that their parameters stay equal.

    The scaler's check for infinities already reduces over processes, so it is given an infinity where the flag is set.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    device = next((p.device for p in parameters if devices.is_xla(p.device.type)), None)
    if device is None:
        return flag
    probe = torch.where(flag.to(device, non_blocking=True).reshape(()) != 0, math.inf, 0.0)
    found = torch.zeros((), dtype=torch.float32, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([probe], found, torch.ones_like(found))
    return found
