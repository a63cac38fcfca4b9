"""Skip a step of any optimizer on the device.

The step always runs, and the engine undoes what it wrote, to whatever tensor, where gradients are not finite
(`xla_amp.engines.base.Engine.guard`).  State that torch's optimizers make in their first step is made before it.

What a step changes in Python cannot be undone by the device.  So the first steps of an optimizer that is not
torch.optim's are decided on the host, as torch's scaler does: the flag is read, and a skipped step is not called.  If
such a step changes no Python value, the device decides from then on; otherwise it stays so.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xla_amp.common import events
from xla_amp.engines import base, devices
from xla_amp.training import capturable, held, initial_state, reader


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
    step = step or capturable.own_step(optimizer) or optimizer.step
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not all(devices.is_xla(parameter.device.type) for parameter in parameters):
        return None if found_inf.item() else step()
    with _counting_on_device(optimizer):
        decides = _decides.get(optimizer)
        # torch_xla gives wrong gradients to a second optimizer where the flag of the first is read before its step.
        on_torch_xla = devices.engine().DEVICE_TYPE != base.LAZY
        if on_torch_xla or decides is _Decides.DEVICE or (decides is None and _has_torchs_step(optimizer)):
            return _undone(optimizer, found_inf, step)
        if found_inf.item():
            left_out(optimizer, found_inf)
            return None
        return step() if decides is _Decides.HOST else _watched(optimizer, step)


def _has_torchs_step(optimizer: Optimizer) -> bool:
    return initial_state.has_torchs_step(initial_state.torchs_class(optimizer))


def _undone(optimizer: Optimizer, found_inf: torch.Tensor, step: Callable[[], Any]) -> Any:
    """A step that the device undoes where `found_inf` is not zero; also on the host, if it has changed values there."""
    with devices.engine().guard(functools.partial(reader.device_tensors, optimizer)) as guard:
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
    with devices.engine().guard(functools.partial(reader.device_tensors, optimizer)) as guard:
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


def _warn(optimizer: Optimizer, path: reader.Path | None) -> None:
    what = "reads values of the device" if path is None else "keeps state on the host that changes"
    where = "" if path is None else f" ({reader.name(path)})"
    events.warn(
        f"{type(optimizer).__name__} {what} in every step{where}, so each step waits for the device to learn whether "
        "it is skipped. xla_amp.syncfree.SGD, Adam and AdamW, and those of torch.optim, do not wait"
    )


@contextlib.contextmanager
def _counting_on_device(optimizer: Optimizer) -> Iterator[None]:
    """Makes an optimizer, and those that it holds, count steps on the device where they support it."""
    with contextlib.ExitStack() as stack:
        every = [optimizer] if _has_torchs_step(optimizer) else reader.optimizers(optimizer)
        for each in reversed(every):  # an outer optimizer may have the groups of an inner one
            stack.enter_context(_one_counting(each))
        yield


@contextlib.contextmanager
def _one_counting(optimizer: Optimizer) -> Iterator[None]:
    with capturable.counting(optimizer):
        pass  # its state is there before the step begins
    # A wrapper that has not called torch's constructor has no hooks; those of the optimizer inside are enough.
    if capturable.counts_itself(optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        yield
        return
    # In hooks, so that global hooks of optimizers, which run around these, see the options as they were.
    counting = contextlib.ExitStack()
    begin = optimizer.register_step_pre_hook(lambda *_: counting.enter_context(capturable.counting(optimizer)))
    with counting, begin, optimizer.register_step_post_hook(lambda *_: counting.close()):
        yield
