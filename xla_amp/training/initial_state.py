"""Optimizer state before the first step, so that the first step is the same program as the next ones.

torch's optimizers make their state in the first step.  Recorded there, its creation would be a part of that step's
program, and the next step another program, as long to compile.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from xla_amp.engines import devices


def create(optimizer: Optimizer) -> None:
    """Makes the state that parameters with a gradient lack, as the optimizer's step would, outside the step.

    Only of torch.optim's classes.  SGD's momentum begins as zeros, where torch begins with a copy of the gradient: the
    first step leaves the same momentum.
    """
    init_group = getattr(optimizer, "_init_group", None)
    is_sgd, is_sparse = isinstance(optimizer, torch.optim.SGD), isinstance(optimizer, torch.optim.SparseAdam)
    if not is_sparse and (init_group is None or not is_torchs(init_group)):
        return
    with torch.no_grad(), _OutsideStep():  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            lacking = [p for p in group["params"] if p.grad is not None and _lacks(optimizer.state.get(p), is_sgd)]
            if not lacking:
                continue
            if init_group is not None and not is_sgd:
                lists = len(inspect.signature(init_group).parameters) - 1
                init_group(group, *([] for _ in range(lists)))
                for parameter in lacking if isinstance(optimizer, torch.optim.RAdam) else ():
                    # Its rectification is a difference of nearly equal numbers, which torch computes in Python.
                    count = torch.zeros((), dtype=torch.float64, device=parameter.device)
                    optimizer.state[parameter]["step"] = count
                continue
            for parameter in lacking:
                if is_sparse and parameter.grad.is_sparse:  # which counts in Python, and has no `_init_group`
                    state: dict[str, Any] = {"step": torch.zeros((), device=parameter.device)}
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[parameter] = state
                elif is_sgd and group["momentum"] and not group["dampening"] and not parameter.grad.is_sparse:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _lacks(state: Any, momentum: bool) -> bool:
    return not state or (momentum and state.get("momentum_buffer") is None)


def has_torchs_step(kind: type) -> bool:
    """Whether the step of a class, and the state that this makes, are those of a class of torch.optim."""
    functions = (getattr(kind, name, None) for name in ("step", "_init_group"))
    return all(each is None or is_torchs(inspect.unwrap(each)) for each in functions)


def torchs_class(optimizer: Optimizer) -> type:
    """The optimizer's class; that of which it has the step, where `xla_amp.syncfree` has made a class around it."""
    kind: type = getattr(type(optimizer), "steps_as", type(optimizer))
    return kind


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
