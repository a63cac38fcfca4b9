"""torch.optim's steps on an XLA device: they count there, and read no value.

Most classes can (``capturable``, or fused kernels), if a group's option tells them.  `counting` sets it for one step,
and puts it back, so that checkpoints load where it is not supported.  In torch the steps of Adafactor and SparseAdam
read norms and counts to compute with them in Python; they have steps here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from xla_amp.engines import base, devices
from xla_amp.training import initial_state

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def form(kind: type, group: Mapping[str, Any]) -> str | None:
    """The option with which the step of a class counts on the device, for a group; None if no option makes it.

    SGD, Adam and AdamW are fused on the lazy device unless another form was asked for, as torch chooses ``foreach`` on
    CUDA.  Adagrad has no ``capturable``, but its fused kernel takes the count as a tensor.
    """
    if group.get("differentiable"):
        return None
    if option := next((name for name in ("fused", "capturable") if group.get(name)), None):
        return option
    parameters = group["params"]
    if not _OPTIONS.intersection(group) or not all(devices.is_xla(p.device.type) for p in parameters):
        return None
    if "fused" in group and _is_fused(kind, group) and all(map(_fits, parameters)):
        return "fused"
    return "capturable" if "capturable" in group else None


_OPTIONS = frozenset({"fused", "capturable"})


def _is_fused(kind: type, group: Mapping[str, Any]) -> bool:
    if issubclass(kind, torch.optim.Adagrad):
        return True
    plain = group["fused"] is None and group.get("foreach") is None
    if not plain or devices.engine().DEVICE_TYPE != base.LAZY or not initial_state.has_torchs_step(kind):
        return False
    # torch dampens from the second step on: a parameter whose gradients begin later needs another kernel.
    is_sgd = issubclass(kind, torch.optim.SGD) and not (group["momentum"] and group["dampening"])
    return is_sgd or issubclass(kind, torch.optim.Adam)


def _fits(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    dense = gradient is None or not gradient.is_sparse
    return dense and type(parameter) in _PLAIN and parameter.is_floating_point()


@contextlib.contextmanager
def counting(optimizer: Optimizer, kind: type | None = None) -> Iterator[None]:
    """Context manager in which an optimizer counts on the device where it can; its state is there afterwards, too.

    Args:
        optimizer: of any class.
        kind: the class whose step runs inside, if this is a base of the optimizer's.
    """
    kind = kind or initial_state.torchs_class(optimizer)
    forms = [(group, option) for group in optimizer.param_groups if (option := form(kind, group))]
    changed = [(group, option, group[option]) for group, option in forms if not group[option]]
    for group, option, _ in changed:
        group[option] = True
    try:
        if initial_state.has_torchs_step(kind):
            initial_state.create(optimizer)
        for group in optimizer.param_groups if step_of(optimizer, kind) else [group for group, _ in forms]:
            for parameter in group["params"]:
                _move_counts(optimizer.state.get(parameter, {}), parameter.device, kind)
        yield
    finally:
        for group, option, value in changed:
            group[option] = value


def _move_counts(state: dict[str, Any], device: torch.device, kind: type) -> None:
    if kind is torch.optim.SparseAdam and isinstance(state.get("step"), int):
        state["step"] = torch.tensor(float(state["step"]))
    if kind is torch.optim.RAdam and state:
        state["step"] = state["step"].double()  # as `initial_state` makes it
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != device:
            state[name] = value.to(device)


def step_of(optimizer: Optimizer, kind: type) -> Callable[[Any], None] | None:
    """The step of a class of torch.optim that reads values in torch; None for others, and for other devices."""
    step = _STEPS.get(kind)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]] if step else []
    return step if all(devices.is_xla(p.device.type) and p.is_floating_point() for p in parameters) else None


def counts_itself(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer is one of torch.optim's, which counts on the lazy device unasked."""
    kind = initial_state.torchs_class(optimizer)
    return devices.engine().DEVICE_TYPE == base.LAZY and initial_state.has_torchs_step(kind)


def own_step(optimizer: Optimizer) -> Callable[[], None] | None:
    """`step_of` with the optimizer's hooks, for an engine where torch's step does not call it."""
    kind = initial_state.torchs_class(optimizer)
    step = None if counts_itself(optimizer) else step_of(optimizer, kind)
    if step is None:
        return None

    def counted(optimizer: Optimizer) -> None:
        with counting(optimizer, kind):
            step(optimizer)

    return lambda: Optimizer.profile_hook_step(counted)(optimizer)


@torch.no_grad()
def adafactor(optimizer: Any) -> None:
    """One step of `torch.optim.Adafactor` (Shazeer and Stern 2018), one parameter at a time.

    Scalars are float64 on the device, as they are in torch's Python.
    """
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


_STEPS: Mapping[type, Callable[[Any], None]] = {
    torch.optim.Adafactor: adafactor,
    torch.optim.SparseAdam: sparse_adam,
}
