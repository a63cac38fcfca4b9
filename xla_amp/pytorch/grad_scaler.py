"""`GradScaler`: torch's loss scaler, without waiting for the device.

torch's own scaler asks the device whether the gradients were finite and then decides in Python.  Here the optimizer
steps in any case and old values are selected where they were not, so a step stays one program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from xla_amp.pytorch import devices
from xla_amp.pytorch.selecting import step_where_finite


class GradScaler(torch.amp.GradScaler):
    """Multiplies losses by a scale that grows while gradients stay finite and shrinks when they do not.

    Micikevicius et al. 2018, with torch's rule: a step with an inf or NaN gradient is skipped and multiplies the scale
    by `backoff_factor`; `growth_interval` good steps in a row multiply it by `growth_factor`.

    Args:
        device: where the losses live: a device string (``"xla"`` is the active XLA device) or a `torch.device`.
        init_scale: first scale.
        growth_factor: more than 1.
        backoff_factor: less than 1.
        growth_interval: good steps before the scale grows.
        enabled: False makes every method pass its argument on.

    The scale is a float32 tensor () on the device.  On an XLA device nothing in `scale`, `unscale_`, `step` and
    `update` reads it, with any optimizer whose state is on the device; `get_scale`, `state_dict` and pickling do.
    State, errors and attributes are those of `torch.amp.GradScaler`, and checkpoints can be exchanged.

    Example:
        >>> scaler = GradScaler("cpu", init_scale=4.0)
        >>> scaler.scale(torch.tensor(0.5))
        tensor(2.)
    """

    def __init__(
        self,
        device: Any = devices.XLA,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        name = devices.device_type(device, "GradScaler")
        super().__init__(name, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._skipped: torch.Tensor | None = None
        self._init_skipped = 0
        self._last_skipped: torch.Tensor | None = None

    def scale(self, outputs: Any) -> Any:
        """`outputs` (a tensor, or tensors in nested lists, tuples, named tuples or dicts) times the scale.

        Raises:
            ValueError: something else than tensors is in there.
        """
        if not self._enabled or isinstance(outputs, torch.Tensor):
            return super().scale(outputs)
        if not isinstance(outputs, list | tuple | Mapping):
            if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
                _refuse(outputs)
            return super().scale(outputs)
        return tree_map(lambda value: super(GradScaler, self).scale(value) if _is_tensor(value) else value, outputs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales the gradients unless `unscale_` did, and steps `optimizer` where they are finite.

        Where they are not, parameters and optimizer state keep their values.  Other arguments go to ``optimizer.step``.

        Raises:
            RuntimeError: called twice since the last `update`, or with a closure.
        """
        if self._enabled and any(callable(argument) for argument in args):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        return super().step(optimizer, *args, **kwargs)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        found = list(optimizer_state["found_inf_per_device"].values())
        if not all(devices.is_xla(flag.device.type) for flag in found):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        return step_where_finite(optimizer, sum(found[1:], found[0]), lambda: optimizer.step(*args, **kwargs))

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Ends the iteration: grows or shrinks the scale, or sets it to `new_scale` (a number or 1-element tensor)."""
        if not self._enabled:
            return
        states = self._per_optimizer_states.values()
        found = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if self._scale is not None and found:
            self._count(self._scale.device, found)
        super().update(float(new_scale) if isinstance(new_scale, int) else new_scale)

    def _count(self, device: torch.device, found: list[torch.Tensor]) -> None:
        flags = [flag.to(device, non_blocking=True) for flag in found]
        skipped = flags[0] if len(flags) == 1 else torch.stack(flags).sum()
        self._last_skipped = skipped != 0
        if self._skipped is None:
            self._skipped = torch.full((), self._init_skipped, dtype=torch.int32, device=device)
        self._skipped.add_(self._last_skipped)

    def step_was_skipped(self) -> torch.Tensor:
        """bool (): whether the newest iteration (up to its `update`) skipped an optimizer; reading it is up to you.

        Raises:
            RuntimeError: there was no iteration yet.
        """
        if self._last_skipped is None:
            raise RuntimeError("step_was_skipped(): no iteration has ended yet; call scaler.step() and update() first")
        return self._last_skipped

    def skipped_steps(self) -> torch.Tensor:
        """int32 (): iterations so far in which an optimizer was skipped, on the scale's device."""
        if self._skipped is None:
            return torch.tensor(self._init_skipped, dtype=torch.int32)
        return self._skipped.clone()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            state["_init_skipped"] = int(self.skipped_steps())
        state["_skipped"] = state["_last_skipped"] = None
        return state


def _is_tensor(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        _refuse(value)
    return True


def _refuse(value: Any) -> None:
    raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {value!r} ({type(value).__name__})")
