"""`GradScaler`: torch's loss scaler without a host sync.

torch's scaler reads from the device whether gradients are finite and decides in Python.  Here the optimizer always
steps, and old values are selected where gradients are not finite, so a step stays one program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, overload

import torch

from xla_amp.common import arguments, interrupts
from xla_amp.engines import devices
from xla_amp.errors import SkipLimitError
from xla_amp.public_names import Left
from xla_amp.torch_common.trees import tree_map


class GradScaler(Left, torch.amp.GradScaler):
    """Multiplies losses by a scale that grows while gradients stay finite and shrinks when they do not.

    Micikevicius et al. 2018, with torch's rule: a step with an inf or NaN gradient is skipped and multiplies the scale
    by `backoff_factor`; `growth_interval` good steps in a row multiply it by `growth_factor`.

    Args:
        device: the device of the losses: a device string (``"xla"`` is the active XLA device) or a `torch.device`.
        init_scale: first scale.
        growth_factor: more than 1.
        backoff_factor: less than 1.
        growth_interval: good steps before the scale grows.
        enabled: False makes every method return its argument unchanged.
        min_scale: lower bound of the scale that `update` computes; a scale that was set is not clamped until the next
            `update`.
        max_scale: upper bound of it.
        max_consecutive_skips: `update` raises `SkipLimitError` after this many skipped steps in a row.  To check, it
            reads one number from the device every `max_consecutive_skips` steps; without the limit it reads nothing.
        use_zero_grad: torch_xla's argument; True raises ValueError.

    The scale is a float32 tensor () on the device.  On an XLA device `scale`, `unscale_`, `step` and `update` do not
    read it, with any optimizer whose state is on the device; `get_scale`, `state_dict` and pickling do.  State, errors
    and attributes are those of `torch.amp.GradScaler`, and checkpoints can be exchanged.

    Example:
        >>> scaler = GradScaler("cpu", init_scale=4.0)
        >>> scaler.scale(torch.tensor(0.5))
        tensor(2.)
    """

    def __init__(
        self,
        device: str | torch.device = devices.XLA,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        max_consecutive_skips: int | None = None,
        use_zero_grad: bool = False,
    ) -> None:
        if use_zero_grad:
            raise ValueError(
                "GradScaler(use_zero_grad=True): expected False, since torch_xla then steps by gradients of zero; "
                "leave it out: a step of any optimizer is skipped, with its state, and without a wait"
            )
        name = devices.device_type(device, "GradScaler")
        super().__init__(name, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        _check_limits(init_scale, min_scale, max_scale, max_consecutive_skips)
        self._min_scale, self._max_scale = min_scale, max_scale
        self._max_skips = max_consecutive_skips
        self._counters: list[torch.Tensor] | None = None
        """Three counts of skipped iterations, each float32 (): all, those in a row since the last `SkipLimitError`, and
        those in a row.  float32 because flags are added to them in place; exact up to 2**24."""
        self._init_counters = [0, 0, 0]
        self._ended = False
        """Whether an iteration has ended."""
        self._until_check = max_consecutive_skips or 0
        """Updates before the limit can be reached."""

    def __repr__(self) -> str:
        """The settings; `get_scale` reads the scale, which is on the device."""
        settings = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
        # A scaler that is not enabled has no other settings, as in torch.
        shown = [f"{name}={vars(self)[f'_{name}']}" for name in settings if f"_{name}" in vars(self)]
        return f"GradScaler({', '.join(shown)})"

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    @overload
    def scale(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]: ...
    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...
    @overload
    def scale(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]: ...
    @overload
    def scale(self, outputs: Iterable[Any]) -> Iterable[Any]: ...
    def scale(self, outputs: Any) -> Any:
        """`outputs` (a tensor, or tensors in nested lists, tuples, named tuples or dicts) times the scale.

        Raises:
            ValueError: a value is not a tensor.
        """
        if not self.is_enabled() or isinstance(outputs, torch.Tensor):
            return super().scale(outputs)
        if not isinstance(outputs, list | tuple | Mapping):
            if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
                _refuse(outputs)
            return super().scale(outputs)
        return tree_map(lambda value: super(GradScaler, self).scale(value) if _is_tensor(value) else value, outputs)

    @interrupts.deferred
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients unless `unscale_` did, and steps `optimizer` where they are finite.

        Otherwise parameters and optimizer state keep their values.  Other arguments go to ``optimizer.step``.

        Raises:
            RuntimeError: called twice since the last `update`, or with a closure.
        """
        if self.is_enabled() and any(callable(argument) for argument in args):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        return super().step(optimizer, *args, **kwargs)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        found = list(optimizer_state["found_inf_per_device"].values())
        if not all(devices.is_xla(flag.device.type) for flag in found):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        from xla_amp.training import skip_step  # optimizers that are not fused load it

        result: float | None = skip_step.scaled_step(optimizer, found, args, kwargs)
        return result

    unscale_ = interrupts.deferred(torch.amp.GradScaler.unscale_)

    @interrupts.deferred
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Ends the iteration: grows or shrinks the scale, or sets it to `new_scale` (a number or 1-element tensor)."""
        if not self.is_enabled():
            return
        states = self._per_optimizer_states.values()
        found = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if self._scale is not None and found:
            self._count(self._scale.device, found)
        super().update(float(new_scale) if isinstance(new_scale, int) else new_scale)
        if self._scale is not None and new_scale is None and (self._min_scale, self._max_scale) != (None, None):
            self._scale.clamp_(self._min_scale, self._max_scale)
        if found and self._max_skips:
            self._until_check -= 1
            if self._until_check <= 0:
                self.check_skips()

    def _count(self, device: torch.device, found: list[torch.Tensor]) -> None:
        """Updates the counts, in two recorded operations for one flag.  Each flag is 0 or 1."""
        flags = [flag.to(device, non_blocking=True) for flag in found]
        flag = flags[0] if len(flags) == 1 else torch.stack(flags).max()
        if self._counters is None:
            self._counters = [torch.tensor(float(count), device=device) for count in self._init_counters]
        # In place, so that a replayed step goes on counting.  (n + flag) * flag is n + 1 or 0.
        torch._foreach_add_(self._counters, [flag] * 3)
        torch._foreach_mul_(self._counters[1:], [flag] * 2)
        self._ended = True

    def check_skips(self) -> None:
        """Reads how many steps in a row were skipped.  `update` calls this as often as needed.

        Where `update` is part of a step that `xla_amp.compile` replays, call it between steps.

        Raises:
            SkipLimitError: `max_consecutive_skips` steps in a row were skipped; the count restarts from zero.
        """
        if not self._max_skips or self._counters is None:
            return
        in_a_row = int(self._counters[1])
        # The limit cannot be reached before this many more steps.
        self._until_check = self._max_skips - in_a_row
        if in_a_row < self._max_skips:
            return
        self._until_check = self._max_skips
        self._counters[1].zero_()
        raise SkipLimitError(in_a_row, self.get_scale())

    def step_was_skipped(self) -> torch.Tensor:
        """bool (), on the device: whether the newest iteration (up to its `update`) skipped an optimizer.

        Raises:
            RuntimeError: there was no iteration yet.
        """
        if self._counters is None or not self._ended:
            raise RuntimeError("step_was_skipped(): no iteration has ended yet; call scaler.step() and update() first")
        return self._counters[2] != 0

    def skipped_steps(self) -> torch.Tensor:
        """int32 (): iterations so far in which an optimizer was skipped, on the scale's device."""
        return self._skip_count(0)

    def consecutive_skips(self) -> torch.Tensor:
        """int32 (): iterations in a row, up to the newest, in which an optimizer was skipped."""
        return self._skip_count(1)

    def _skip_count(self, index: int) -> torch.Tensor:
        if self._counters is None:
            return torch.tensor(self._init_counters[index], dtype=torch.int32)
        return self._counters[index].to(torch.int32)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.is_enabled() and self._counters is not None:
            state["_init_counters"] = [int(count) for count in torch.stack(self._counters).tolist()]
        state.update(_counters=None, _ended=False)
        return state


def _check_limits(init: float, smallest: float | None, largest: float | None, skips: int | None) -> None:
    for name, value in (("init_scale", init), ("min_scale", smallest), ("max_scale", largest)):
        arguments.require(f"GradScaler({name}=...)", value, (int, float, type(None)), "a number such as 65536.0")
    low, high = smallest if smallest is not None else 0.0, largest if largest is not None else math.inf
    if not (low >= 0 and low <= high):
        raise ValueError(
            f"GradScaler(min_scale={smallest!r}, max_scale={largest!r}): expected 0 < min_scale <= max_scale"
        )
    if not low <= init <= high:
        raise ValueError(
            f"GradScaler(init_scale={init!r}, min_scale={smallest!r}, max_scale={largest!r}): the first scale is out "
            "of the bounds; give init_scale a value between them"
        )
    if skips is not None and (isinstance(skips, bool) or not isinstance(skips, int) or skips < 1):
        raise ValueError(f"GradScaler(max_consecutive_skips={skips!r}): expected a positive number of steps, or None")


def _is_tensor(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        _refuse(value)
    return True


def _refuse(value: Any) -> None:
    raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {value!r} ({type(value).__name__})")
