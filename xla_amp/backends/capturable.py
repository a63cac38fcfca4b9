"""Capturable (host-sync-free) steps for torch optimizers that lack one: Adafactor and SparseAdam.

Most of torch.optim can count on the device (``capturable``, or its fused kernels).  In torch the steps of these two
read norms and counts back to compute with them in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from xla_amp.backends import devices, initial_state


def step_of(optimizer: Optimizer) -> Callable[[], Any] | None:
    """A capturable step for `optimizer`, hooks included; None where this module has none.

    Only for torch's class itself or the class that `wrap` makes of it: a subclass may override `step`.
    """
    plain = initial_state.torchs_class(optimizer)
    step = _STEPS.get(plain.__name__)
    if step is None or not initial_state.is_torchs(plain):
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(devices.is_xla(p.device.type) and p.is_floating_point() for p in parameters):
        return None
    return lambda: Optimizer.profile_hook_step(step)(optimizer)  # hooks, as torch's step has


def make_state(optimizer: Optimizer) -> None:
    """Makes the state that the step of an optimizer in `_STEPS` needs, with counts on the device."""
    initial_state.create(optimizer)
    sparse = initial_state.torchs_class(optimizer) is torch.optim.SparseAdam
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or (sparse and not parameter.grad.is_sparse):
                continue
            state = optimizer.state[parameter]
            if sparse and not state:  # which counts in Python, and has no `_init_group`
                state["step"], state["exp_avg"] = 0, torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(parameter.device)


@torch.no_grad()
def adafactor(optimizer: Any) -> None:
    """One step of `torch.optim.Adafactor` (Shazeer and Stern 2018), one parameter at a time.

    Scalars are float64 on the device, as they are in torch's Python.
    """
    make_state(optimizer)
    for group in optimizer.param_groups:
        lists: list[list[Any]] = [[] for _ in range(6)]
        optimizer._init_group(group, *lists)
        for each in zip(*lists, strict=True):
            _adafactor_one(group, *each)


def _adafactor_one(
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    rows: torch.Tensor | None,
    columns: torch.Tensor | None,
    variance: torch.Tensor | None,
    step: torch.Tensor,
) -> None:
    lr, dtype = group["lr"], gradient.dtype
    relative, absolute = group["eps"]
    floor = torch.finfo(parameter.dtype).eps if relative is None else relative
    if isinstance(lr, torch.Tensor):
        lr = lr.to(parameter.device).double().reshape(())
    if group["maximize"]:
        gradient = -gradient
    count = step.add_(1).double()
    share = count.pow(group["beta2_decay"]).to(dtype)
    rate = count.rsqrt().clamp(max=lr)
    size = _root_mean_square(parameter).clamp(min=absolute) * rate
    if group["weight_decay"] != 0:
        parameter.mul_(1 - lr * group["weight_decay"])
    if rows is not None and columns is not None:
        rows.lerp_(torch.norm(gradient, dim=-1, keepdim=True).square() / gradient.size(-1), share)
        columns.lerp_(torch.norm(gradient, dim=-2, keepdim=True).square() / gradient.size(-2), share)
        estimate = (rows @ columns) / rows.mean(dim=-2, keepdim=True).clamp(min=floor)
    else:
        estimate = variance.lerp_(gradient * gradient, share)  # type: ignore[union-attr]  # of vectors, instead
    update = estimate.clamp(min=floor * floor).rsqrt() * gradient
    shrink = (_root_mean_square(update) / group["d"]).clamp(min=1.0)
    parameter.sub_(update * (size / shrink).to(dtype))


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = tensor.norm(2).double() / tensor.numel() ** 0.5
    return mean


@torch.no_grad()
def sparse_adam(optimizer: Any) -> None:
    """One step of `torch.optim.SparseAdam`: Adam (Kingma and Ba 2015) on the rows that have gradient entries.

    The count is a float32 tensor on the device, and bias corrections are formed from it in float64.
    """
    make_state(optimizer)
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if not parameter.grad.is_sparse:
                raise RuntimeError("SparseAdam does not support dense gradients, please consider Adam instead")
            state = optimizer.state[parameter]
            _sparse_adam_one(group, parameter, parameter.grad.coalesce(), state, beta1, beta2)


def _sparse_adam_one(
    group: Mapping[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, state: Any, beta1: float, beta2: float
) -> None:
    def sparse_like_gradient(values: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(gradient.indices(), values, parameter.shape, check_invariants=False)

    values = -gradient.values() if group["maximize"] else gradient.values()
    average, squares = state["exp_avg"], state["exp_avg_sq"]
    old_average, old_squares = average.sparse_mask(gradient).values(), squares.sparse_mask(gradient).values()
    average_change = (values - old_average) * (1 - beta1)
    squares_change = (values.pow(2) - old_squares) * (1 - beta2)
    average.add_(sparse_like_gradient(average_change))
    squares.add_(sparse_like_gradient(squares_change))
    count, lr = state["step"].add_(1).double(), group["lr"]
    if isinstance(lr, torch.Tensor):
        lr = lr.to(parameter.device).double().reshape(())
    size = lr * (1 - beta2**count).sqrt() / (1 - beta1**count)
    root = (squares_change + old_squares).sqrt() + group["eps"]
    parameter.add_(sparse_like_gradient(-(average_change + old_average) / root * size.to(root.dtype)))


_STEPS: Mapping[str, Callable[[Any], None]] = {"Adafactor": adafactor, "SparseAdam": sparse_adam}
"""Name of torch's class -> its step."""
