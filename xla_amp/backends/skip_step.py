"""Skip a step of any optimizer on the device.

The step always runs, and the engine undoes what it wrote, to whatever tensor, where gradients are not finite
(`xla_amp.backends.base.Engine.guard`).  State that torch's optimizers make in their first step is made before it.

What a step changes in Python cannot be undone by the device.  So the first steps of an optimizer that is not
torch.optim's are decided on the host, as torch's scaler does: the flag is read, and a skipped step is not called.  If
such a step changes no Python value, the device decides from then on; otherwise it stays so.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xla_amp.backends import base, capturable, devices, held, initial_state
from xla_amp.common import events


class _Decides(enum.Enum):
    """Who decides whether a step is skipped."""

    DEVICE = enum.auto()
    HOST_FOR_NOW = enum.auto()
    """Until a step has changed no Python value."""
    HOST = enum.auto()


@events.Point
def left_out(optimizer: Optimizer, found_inf: torch.Tensor) -> None:
    """The step of `optimizer` is not called, because the host has read `found_inf`."""


_decides: weakref.WeakKeyDictionary[Optimizer, _Decides] = weakref.WeakKeyDictionary()


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
    step = step or capturable.step_of(optimizer) or optimizer.step
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not all(devices.is_xla(parameter.device.type) for parameter in parameters):
        return None if found_inf.item() else step()
    with _counting_on_device(optimizer):
        decides = _decides.get(optimizer)
        # torch_xla gives wrong gradients to a second optimizer where the flag of the first is read before its step.
        on_torch_xla = devices.engine().DEVICE_TYPE != base.LAZY
        if on_torch_xla or decides is _Decides.DEVICE or (decides is None and initial_state.has_torchs_step(optimizer)):
            return _undone(optimizer, found_inf, step)
        if found_inf.item():
            left_out(optimizer, found_inf)
            return None
        return step() if decides is _Decides.HOST else _watched(optimizer, step)


def _undone(optimizer: Optimizer, found_inf: torch.Tensor, step: Callable[[], Any]) -> Any:
    """A step that the device undoes where `found_inf` is not zero; also on the host, if it has changed values there."""
    with devices.engine().guard(functools.partial(held.device_tensors, optimizer)) as guard:
        before = held.Held(optimizer)
        try:
            result = step()
            waited, change = guard.waited(), before.change(guard.made)
        except Exception:
            # It may be that it computes with values that are not finite: torch would not have called it.
            if not found_inf.item():
                raise
            result, waited, change = None, True, held.Change([], None, created=True)
        guard.undo(found_inf, change.replaced)
    if change.path is not None and devices.engine().DEVICE_TYPE != base.LAZY:
        _warn(optimizer, change.path)
    if change.path is not None or waited:
        _decides[optimizer] = _Decides.HOST_FOR_NOW
    if (change.path is not None or change.created) and found_inf.item():
        before.restore()
        return None
    return result


def _watched(optimizer: Optimizer, step: Callable[[], Any]) -> Any:
    """A step that is not skipped; finds out who decides on the next ones."""
    with devices.engine().guard(functools.partial(held.device_tensors, optimizer)) as guard:
        before = held.Held(optimizer)
        result = step()
        waited, change = guard.waited(), before.change(guard.made)
    if change.path is None and not waited:
        decides = _Decides.HOST_FOR_NOW if change.created else _Decides.DEVICE
    elif optimizer not in _decides:
        decides = _Decides.HOST_FOR_NOW  # what is set in the first step only may stay
    else:
        decides = _Decides.HOST
        _warn(optimizer, change.path)
    _decides[optimizer] = decides
    return result


def _warn(optimizer: Optimizer, path: held.Path | None) -> None:
    what = "reads values of the device" if path is None else "keeps state on the host that changes"
    where = "" if path is None else f" ({held.name(path)})"
    events.warn(
        f"{type(optimizer).__name__} {what} in every step{where}, so each step waits for the device to learn whether "
        "it is skipped. xla_amp.syncfree.SGD, Adam and AdamW, and those of torch.optim, do not wait"
    )


@contextlib.contextmanager
def _counting_on_device(optimizer: Optimizer) -> Iterator[None]:
    """Makes an optimizer, and those that it holds, count steps on the device where they support it.

    The option is restored afterwards, so checkpoints load where it is not supported; the counts stay on the device.
    """
    with contextlib.ExitStack() as stack:
        every = [optimizer] if initial_state.has_torchs_step(optimizer) else held.optimizers(optimizer)
        for each in reversed(every):  # an outer optimizer may have the groups of an inner one
            stack.enter_context(_one_counting(each))
        yield


@contextlib.contextmanager
def _one_counting(optimizer: Optimizer) -> Iterator[None]:
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
    else:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(each.grad is not None and each not in optimizer.state for each in parameters):
            initial_state.create(optimizer)
    off()
    for group, _ in options:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != parameter.device:
                    optimizer.state[parameter][name] = value.to(parameter.device)
    # A wrapper that has not called torch's constructor has no hooks; those of the optimizer inside are enough.
    if not options or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        yield
        return
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
