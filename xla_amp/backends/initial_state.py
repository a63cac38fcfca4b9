"""Optimizer state before the first step, so that the first step is the same program as the next ones.

torch's optimizers make their state in the first step.  Recorded there, its creation would be a part of that step's
program, and the next step another program, as long to compile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from xla_amp.backends import devices


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """`create` in a hook before a step; where the step gets a closure, after that, which computes the gradients."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if optimizer.state:
        return None
    if closure is None or not _makes_state(optimizer):
        return create(optimizer)

    def then_create() -> Any:
        loss = closure()
        create(optimizer)
        return loss

    return (optimizer, then_create), {}


def create(optimizer: Optimizer) -> None:
    """Makes the state that parameters with a gradient lack, as the optimizer's step would, outside the step.

    Only for steps of torch.optim's own classes.  SGD's momentum begins as zeros, where torch begins with a copy of the
    gradient: the first step leaves the same momentum.
    """
    if not _makes_state(optimizer):
        return
    init_group: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]
    lists = len(inspect.signature(init_group).parameters) - 1
    with torch.no_grad(), _OutsideStep():  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            init_group(group, *([] for _ in range(lists)))
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    if parameter.grad is None or parameter.grad.is_sparse or state.get("momentum_buffer") is not None:
                        continue
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _makes_state(optimizer: Optimizer) -> bool:
    """Whether its step is one of torch.optim's that make state before their first update."""
    if not has_torchs_step(optimizer) or not hasattr(optimizer, "_init_group"):
        return False
    return not isinstance(optimizer, torch.optim.SGD) or any(
        group["momentum"] and not group["dampening"] for group in optimizer.param_groups
    )


def has_torchs_step(optimizer: Optimizer) -> bool:
    """Whether its step, and the state that this makes, are those of a class of torch.optim."""
    plain: Any = torchs_class(optimizer)
    functions = (getattr(plain, name, None) for name in ("step", "_init_group"))
    return all(each is None or is_torchs(inspect.unwrap(each)) for each in functions)


def torchs_class(optimizer: Optimizer) -> type:
    """The optimizer's class, without the one that `xla_amp.syncfree.wrap` makes of it."""
    kind = type(optimizer)
    return kind.__mro__[2] if getattr(kind, "wraps_next_class", False) else kind


def is_torchs(made: Any) -> bool:
    """Whether a class or a function is one of torch.optim's own."""
    return f"{made.__module__}.".startswith("torch.optim.")


class _OutsideStep(TorchDispatchMode):
    """Makes zeros on the XLA device, and ones of NAdam and ASGD, without recording them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, engine = func.overloadpacket.__name__, devices.engine()
        device = kwargs.get("device") or getattr(args[0] if args else None, "device", None)
        if device is not None and device.type == engine.DEVICE_TYPE:
            if name in ("zeros", "zeros_like", "new_zeros"):
                size = args[0].shape if name == "zeros_like" else args[-1]
                dtype = kwargs.get("dtype") or getattr(args[0], "dtype", torch.get_default_dtype())
                made = engine.zeros([(torch.Size(size), dtype)])
                if made is not None:
                    return made[0]
            elif name == "ones":
                return engine.to_device(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)
