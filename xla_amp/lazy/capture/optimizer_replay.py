"""What optimizers do in a recorded call of a step, and how to do it again without them.

Numbers in ``param_groups`` are followed to where the program takes them (`followed`); the other options, and state that
the host computes with, decide whether a call can be replayed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from xla_amp.lazy.capture.guards import PLAIN
from xla_amp.lazy.capture.symbolic_scalars import Hyperparameter, Ledger
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE


class Call:
    """What the optimizers did in one recorded call."""

    def __init__(self, shift: int) -> None:
        self.ledger = Ledger(shift)
        self.optimizers: list[Optimizer] = []
        self.on_host: str | None = None
        """What an optimizer computes with on the host, in words."""
        self.changed: str | None = None
        """What the step did to an optimizer's options, in words."""
        self._options: list[tuple[Optimizer, list[list[Any]]]] = []
        self._kept: list[tuple[dict[str, Any], str, Any, Any]] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, optimizers that step compute with `Followed` hyperparameters."""
        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        try:
            yield
        finally:
            self._put_back()
            for optimizer, before in self._options:
                if _options(optimizer) != before:
                    self.changed = (
                        f"it changes the options of {type(optimizer).__name__} (a schedule's step?), which a replay "
                        "would not; do that outside"
                    )
            for hook in hooks:
                hook.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            self._options.append((optimizer, _options(optimizer)))
        self.on_host = self.on_host or _state_on_host(optimizer)
        for group in optimizer.param_groups:
            for name, value in group.items():
                stand_in = self._stand_in(id(group), name, value)
                if stand_in is not value:
                    self._kept.append((group, name, value, stand_in))
        for group, name, _, stand_in in self._kept:
            group[name] = stand_in

    def _stand_in(self, group: int, name: str, value: Any) -> Any:
        if _can_be_followed(value):
            return self.ledger.follow(Hyperparameter(group, name, None), lambda: value)
        if isinstance(value, tuple) and any(map(_can_be_followed, value)):
            return tuple(
                self.ledger.follow(Hyperparameter(group, name, place), functools.partial(float, item))
                if _can_be_followed(item)
                else item
                for place, item in enumerate(value)
            )
        return value

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()

    def _put_back(self) -> None:
        for group, name, value, stand_in in self._kept:
            if group[name] is stand_in:
                group[name] = value
        self._kept.clear()

    def reads(self) -> Mapping[Hyperparameter, Callable[[], float]]:
        """How to read each hyperparameter from now on."""
        groups = {id(group): group for optimizer in self.optimizers for group in optimizer.param_groups}
        return {
            hyper: functools.partial(_read, groups[hyper.group], hyper.name, hyper.place) for hyper in self.ledger.reads
        }

    def options(self) -> tuple[list[int], list[Any]]:
        """How many parameters and options each group has, and all options, one after the other."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        sizes = [size for group in groups for size in (len(group["params"]), len(group))]
        return sizes, [value for group in groups for value in group.values()]

    def settings(self) -> list[Any]:
        """The other options of the groups, which a capture holds fixed."""
        return [
            (len(group["params"]), *(_fixed(value) for value in group.values()))
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]


def _options(optimizer: Optimizer) -> list[list[Any]]:
    return [[v for k, v in group.items() if isinstance(v, (*PLAIN, tuple))] for group in optimizer.param_groups]


def _can_be_followed(value: Any) -> bool:
    return type(value) is float and value != 0 and math.isfinite(value)


def _read(group: dict[str, Any], name: str, place: int | None) -> float:
    return group[name] if place is None else group[name][place]


def _fixed(value: Any) -> Any:
    """A group's option as far as a capture depends on it: followed numbers count only as such."""
    if _can_be_followed(value):
        return float
    if isinstance(value, tuple):
        return tuple(map(_fixed, value))
    return id(value) if isinstance(value, (torch.Tensor, list)) else value


def _state_on_host(optimizer: Optimizer) -> str | None:
    """What of the optimizer's state or options the host computes with, in words."""
    name = type(optimizer).__name__
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if type(value) in (int, float) or (isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE):
                return (
                    f"{name} keeps its {key!r} on the host; use the class of the same name in xla_amp.syncfree, or "
                    "capturable=True where the optimizer has it"
                )
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE:
                return f"{name} has a tensor on the host as {key!r}; move it to the device, or give a number"
    return None
