"""What optimizers do in a recorded call.

Float options in ``param_groups`` are tracked to the numbers of the program (`symbolic_scalars`).  The other options are
fixed in a capture.  State that the optimizer computes with on the host prevents a replay.
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

from xla_amp.lazy.capture.symbolic_scalars import FormulaTable, Hyperparameter
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE


class OptimizerSteps:
    """The optimizers that step in one recorded call, and the numbers that they compute.

    Args:
        shift: as in `FormulaTable`.
    """

    def __init__(self, shift: int) -> None:
        self.table = FormulaTable(shift)
        self.optimizers: list[Optimizer] = []
        self.obstacle: str | None = None
        """Why a replay could not do what an optimizer did: it computes on the host, or its options changed."""
        self._options_before: list[tuple[Optimizer, list[list[Any]]]] = []
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        """(group, option, value, symbolic value) while an optimizer steps."""

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Inside, optimizers that step compute with symbolic hyperparameters."""
        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        try:
            yield
        finally:
            self._restore()
            for optimizer, before in self._options_before:
                if _plain_options(optimizer) != before:
                    self.obstacle = self.obstacle or (
                        f"it changes the options of {type(optimizer).__name__} (a schedule's step?), which a replay "
                        "would not; do that outside"
                    )
            for hook in hooks:
                hook.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            self._options_before.append((optimizer, _plain_options(optimizer)))
        self.obstacle = self.obstacle or _host_state(optimizer)
        for group in optimizer.param_groups:
            for name, value in group.items():
                symbolic = self._symbolic(id(group), name, value)
                if symbolic is not value:
                    self._replaced.append((group, name, value, symbolic))
        for group, name, _, symbolic in self._replaced:
            group[name] = symbolic

    def _symbolic(self, group: int, name: str, value: Any) -> Any:
        if _is_trackable(value):
            return self.table.track(Hyperparameter(group, name, None), lambda: value)
        if isinstance(value, tuple) and any(map(_is_trackable, value)):
            return tuple(
                self.table.track(Hyperparameter(group, name, index), functools.partial(float, item))
                if _is_trackable(item)
                else item
                for index, item in enumerate(value)
            )
        return value

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        for group, name, value, symbolic in self._replaced:
            if group[name] is symbolic:
                group[name] = value
        self._replaced.clear()

    def reads(self) -> Mapping[Hyperparameter, Callable[[], float]]:
        """Functions that read the current value of each hyperparameter."""
        groups = {id(group): group for optimizer in self.optimizers for group in optimizer.param_groups}
        return {
            each: functools.partial(_read, groups[each.group], each.name, each.position) for each in self.table.reads
        }

    def fixed_options(self) -> list[Any]:
        """The options that are fixed in a capture."""
        return [
            (len(group["params"]), *(_fixed(value) for value in group.values()))
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]


def _plain_options(optimizer: Optimizer) -> list[list[Any]]:
    return [
        [v for k, v in group.items() if isinstance(v, (bool, int, float, str, tuple, type(None)))]
        for group in optimizer.param_groups
    ]


def _is_trackable(value: Any) -> bool:
    return type(value) is float and value != 0 and math.isfinite(value)


def _read(group: dict[str, Any], name: str, index: int | None) -> float:
    value: float = group[name] if index is None else group[name][index]
    return value


def _fixed(value: Any) -> Any:
    """The part of an option that is fixed in a capture; of a tracked number only its type."""
    if _is_trackable(value):
        return float
    if isinstance(value, tuple):
        return tuple(map(_fixed, value))
    return id(value) if isinstance(value, (torch.Tensor, list)) else value


def _host_state(optimizer: Optimizer) -> str | None:
    """A description of state or options with which the optimizer computes on the host."""
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
