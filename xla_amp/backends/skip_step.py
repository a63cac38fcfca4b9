"""Skip a step of any optimizer on the device.

The step always runs; where gradients are not finite, one select restores parameters and state.  State that torch's
optimizers make in their first step is made before it.  State on the host (a step count in Python), and state that only
the step can make, cannot be selected.  Only then the flag is read and that state is restored as well, so a skipped step
leaves no change in either case.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xla_amp.backends import capturable, devices, initial_state
from xla_amp.backends.step_state import OptimizerState
from xla_amp.common import events


def scaled_step(
    optimizer: Optimizer, flags: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """`step_where_finite` as a scaler steps: with its flags, one of each device, and the arguments of the step."""
    step = functools.partial(optimizer.step, *args, **kwargs) if args or kwargs else None
    return step_where_finite(optimizer, sum(flags[1:], flags[0]), step)


def step_where_finite(optimizer: Optimizer, found_inf: torch.Tensor, step: Callable[[], Any] | None = None) -> Any:
    """Steps `optimizer`, with `step` if given; the step is undone where `found_inf` (on the XLA device) is not zero.

    With parameters on other devices the flag is read first, because their old values cannot be selected.
    """
    engine = devices.engine()
    step = step or capturable.step_of(optimizer) or optimizer.step
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not all(devices.is_xla(parameter.device.type) for parameter in parameters):
        return None if found_inf.item() else step()
    with _counting_on_device(optimizer, parameters):
        before = OptimizerState(optimizer, parameters)
        old = engine.snapshot([*parameters, *before.tensors.values()])
        result = step()
        after = OptimizerState(optimizer, parameters)
        # A step may replace a tensor of its state, so the new ones are those of the same paths.
        new = [after.tensors.get(path, tensor) for path, tensor in before.tensors.items()]
        engine.select(found_inf, [*parameters, *new], old)
        if not before.same_host(after):
            events.warn(
                f"{type(optimizer).__name__} keeps state on the host that changes in every step, so each step waits "
                "for the device to learn whether it was skipped. xla_amp.syncfree.SGD, Adam and AdamW, and those of "
                "torch.optim with fused=True, do not wait"
            )
        elif before.tensors.keys() == after.tensors.keys():
            return result
        if bool(found_inf.item()):
            before.restore()
    return result


@contextlib.contextmanager
def _counting_on_device(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Makes optimizers that support it count steps on the device.

    The option is restored afterwards, so checkpoints load where it is not supported; the counts stay on the device.
    """
    options = [(group, option) for group in optimizer.param_groups if (option := _device_option(optimizer, group))]
    before = [group[option] for group, option in options]

    def on(*_: Any) -> None:
        for group, option in options:
            group[option] = True

    def off(*_: Any) -> None:
        for (group, option), value in zip(options, before, strict=True):
            group[option] = value

    on()
    if capturable.step_of(optimizer) is not None:
        capturable.make_state(optimizer)
    elif any(parameter not in optimizer.state for parameter in parameters):
        initial_state.create(optimizer)
    off()
    for group, _ in options:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != parameter.device:
                    optimizer.state[parameter][name] = value.to(parameter.device)
    # Set in hooks, so that global optimizer hooks, which run around these, see the original options.
    with optimizer.register_step_pre_hook(on), optimizer.register_step_post_hook(off):
        try:
            yield
        finally:
            off()


def _device_option(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """The group's option that makes torch count on the device, if it is supported and not set."""
    if group.get("differentiable"):
        return None
    parameters = group["params"]
    if group.get("capturable") is False:
        return "capturable" if all(devices.is_xla(parameter.device.type) for parameter in parameters) else None
    # Adagrad has no `capturable`, but its fused kernel takes the count as a tensor.
    adagrad = any(c.__name__ == "Adagrad" and initial_state.is_torchs(c) for c in type(optimizer).__mro__)
    fits = all(p.is_floating_point() and (p.grad is None or not p.grad.is_sparse) for p in parameters)
    return "fused" if adagrad and not group["fused"] and fits else None
