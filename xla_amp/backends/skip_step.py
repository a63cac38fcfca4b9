"""Skip a step of any optimizer on the device.

The step always runs; where gradients are not finite, one select restores parameters and state.  State on the host (a
step count in Python) cannot be selected.  Only then the flag is read and the host state is restored as well, so a
skipped step leaves no change in either case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from xla_amp.backends import capturable, devices, initial_state
from xla_amp.backends.step_state import OptimizerState, Path
from xla_amp.common import events

INITIAL: Mapping[str, Mapping[str, float | str]] = MappingProxyType(
    {
        "ASGD": {"step": 0, "eta": "lr", "mu": 1, "ax": 0},
        "Adafactor": {"step": 0, "row_var": 0, "col_var": 0, "variance": 0},
        "Adadelta": {"step": 0, "square_avg": 0, "acc_delta": 0},
        "Adam": {"step": 0, "exp_avg": 0, "exp_avg_sq": 0, "max_exp_avg_sq": 0},
        "Adamax": {"step": 0, "exp_avg": 0, "exp_inf": 0},
        "Muon": {"momentum_buffer": 0},
        "NAdam": {"step": 0, "mu_product": 1, "exp_avg": 0, "exp_avg_sq": 0},
        "RAdam": {"step": 0, "exp_avg": 0, "exp_avg_sq": 0},
        "RMSprop": {"step": 0, "square_avg": 0, "momentum_buffer": 0, "grad_avg": 0},
        "Rprop": {"step": 0, "prev": 0, "step_size": "lr"},
        "SGD": {"momentum_buffer": 0},
        "SparseAdam": {"step": 0, "exp_avg": 0, "exp_avg_sq": 0},
    }
)
"""torch.optim class -> state that its first step creates -> the value that undoes a first step: a number, or the name
of a group's option.  State that is not listed is deleted instead, which requires reading the flag."""


def step_where_finite(optimizer: Optimizer, found_inf: torch.Tensor, step: Callable[[], Any] | None = None) -> Any:
    """Steps `optimizer`, with `step` if given; the step is undone where `found_inf` (on the XLA device) is not zero.

    With parameters on other devices the flag is read first, because their old values cannot be selected.
    """
    engine = devices.engine()
    step = step or capturable.step_of(optimizer) or optimizer.step
    owners = {
        parameter: group
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }
    parameters = list(owners)
    if not all(devices.is_xla(parameter.device.type) for parameter in parameters):
        return None if found_inf.item() else step()
    with _counting_on_device(optimizer, parameters):
        before = OptimizerState(optimizer, parameters)
        kept = [*parameters, *before.tensors.values()]
        values = engine.snapshot(kept)
        result = step()
        after = OptimizerState(optimizer, parameters)
        engine.restore_where(found_inf, kept, values)
        unknown = _reset_new_state(optimizer, found_inf, owners, before, after)
        if unknown or not before.same_host(after):
            if not unknown:
                _warn_of_host_state(optimizer)
            if bool(found_inf.item()):
                before.restore()
    return result


def _reset_new_state(
    optimizer: Optimizer,
    found_inf: torch.Tensor,
    owners: Mapping[torch.Tensor, dict[str, Any]],
    before: OptimizerState,
    after: OptimizerState,
) -> bool:
    """Resets state tensors that the step made; returns whether one of them has no known earlier value."""
    known = {id(tensor) for tensor in before.tensors.values()}
    unknown = False
    for path, tensor in after.tensors.items():
        if id(tensor) in known:
            continue
        start = before.tensors.get(path)  # the step replaced this tensor
        value = _initial(optimizer, path, owners) if start is None else start
        if value is None:
            unknown = True
        else:
            tensor.copy_(torch.where(found_inf != 0, value, tensor))
    return unknown


def _initial(optimizer: Optimizer, path: Path, owners: Mapping[torch.Tensor, dict[str, Any]]) -> Any:
    """The value that undoes the creation of a state tensor by the first step, or None if unknown."""
    parameter, name = path[0], path[1]
    row = next(
        (INITIAL[c.__name__] for c in type(optimizer).__mro__ if c.__name__ in INITIAL and initial_state.is_torchs(c)),
        None,
    )
    if row is None or isinstance(parameter, int) or len(path) > 2 or name not in row:
        return None
    if name == "momentum_buffer" and owners[parameter].get("dampening"):
        return None  # torch does not dampen the first momentum, so a zero buffer is not the same as none
    value = row[name]
    return owners[parameter][value] if isinstance(value, str) else float(value)


@contextlib.contextmanager
def _counting_on_device(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Makes optimizers that support it count steps on the device.

    The option is restored afterwards, so checkpoints load where it is not supported; the counts stay on the device.
    """
    options = [(group, option) for group in optimizer.param_groups if (option := _device_option(optimizer, group))]
    replaced = capturable.step_of(optimizer) is not None
    before = [group[option] for group, option in options]

    def on(*_: Any) -> None:
        for group, option in options:
            group[option] = True

    def off(*_: Any) -> None:
        for (group, option), value in zip(options, before, strict=True):
            group[option] = value

    on()
    initial_state.create(optimizer)
    off()
    for group in optimizer.param_groups if replaced else [group for group, _ in options]:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != parameter.device:
                    optimizer.state[parameter][name] = value.to(parameter.device)
                elif replaced and name == "step" and isinstance(value, int):
                    optimizer.state[parameter][name] = torch.tensor(float(value), device=parameter.device)
    # Set in hooks, so that global optimizer hooks, which run around these, see the original options.
    hooks = optimizer.register_step_pre_hook(on), optimizer.register_step_post_hook(off)
    try:
        yield
    finally:
        off()
        for hook in hooks:
            hook.remove()


def _device_option(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """The group's option that makes torch count on the device, if it is supported and not set."""
    if group.get("differentiable"):
        return None
    parameters = group["params"]
    if group.get("capturable") is False:
        return "capturable" if all(devices.is_xla(parameter.device.type) for parameter in parameters) else None
    # Adagrad has no `capturable`, but its fused kernel takes the count as a tensor.
    adagrad = any(c.__name__ == "Adagrad" and initial_state.is_torchs(c) for c in type(optimizer).__mro__)
    if adagrad and not group["fused"] and all(_fits_fused_kernels(parameter) for parameter in parameters):
        return "fused"
    return None


def _fits_fused_kernels(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and not (parameter.grad is not None and parameter.grad.is_sparse)


_warned: set[type] = set()


def _warn_of_host_state(optimizer: Optimizer) -> None:
    if type(optimizer) in _warned:
        return
    _warned.add(type(optimizer))
    events.warn(
        f"{type(optimizer).__name__} keeps state on the host that changes in every step, so each step waits for "
        "the device to learn whether it was skipped. xla_amp.syncfree.SGD, Adam and AdamW, and torch.optim's with "
        "fused=True, do not wait",
    )
