"""A step of Lightning's Trainer as a captured step: ``strategy=XLAStrategy(capture=True)``.

What a batch causes (``training_step``, the backward pass, and after the last of the accumulated batches clipping and
the optimizer's step) is one captured call.  Values that are logged in it are returned, and logged after it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from xla_amp.integrations import captured
from xla_amp.lazy.capture.compiled_step import compile

_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_GIVEN_EPOCH = ("optimizer_step", "optimizer_zero_grad")
"""What gets the number of the epoch as an argument."""
_METHODS = ("training_step", "forward", "backward", "configure_gradient_clipping", *_GIVEN_EPOCH, *_HOOKS)
"""What Lightning calls of a module in a step."""


class CapturedOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization, whose call for a batch is captured."""

    _part: Any = None
    """The captured step of a batch whose gradients are accumulated."""
    _step: Any = None
    """The captured step of a batch after which the optimizer steps."""
    _reason: str | None = None
    """What prevents it."""
    _gives_epoch = False
    """Whether a method of the user's gets the number of the epoch."""
    _given: Any = None
    """What a recorded call needs and a replay does not; an object, as a step's own lists are compared."""

    def run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> Any:
        """The step of a batch; what it returned and logged."""
        if self._step is None and self._reason is None:
            self._begin(optimizer)
        if self._reason is not None:
            return super().run(optimizer, batch_idx, kwargs)
        trainer: Any = self.trainer
        module, parts = trainer.lightning_module, trainer.accumulate_grad_batches
        first, last = batch_idx % parts == 0 and not self._skip_backward, not trainer.fit_loop._should_accumulate()
        step = self._step if last else self._part
        self._given = types.SimpleNamespace(
            optimizer=optimizer, index=_Index(batch_idx, self._prevent), batch_idx=batch_idx, kwargs=kwargs
        )
        clips = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        epoch = trainer.current_epoch if self._gives_epoch else None
        result, logged = step(kwargs["batch"], first, self._skip_backward, parts, clips, epoch)
        self._given = None
        self._count(first, last)
        for hook, name, value, options in logged:
            module._current_fx_name = hook
            module.log(name, value, **options)
            module._current_fx_name = None
        return result

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        trainer: Any = self.trainer
        module, scaler = trainer.lightning_module, getattr(trainer.precision_plugin, "scaler", None)
        reason = captured.obstacle(trainer.callbacks, Callback, _HOOKS)
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            reason = "training_step takes dataloader_iter"
        if reason is not None:
            self._prevent(reason)
            return
        self._gives_epoch = any(captured.code(module, LightningModule, [name]) for name in _GIVEN_EPOCH)
        state = [module, *filter(None, [scaler]), *captured.code(module, LightningModule, _METHODS)]
        self._part = compile(self._call, state=state)
        self._step = compile(self._call_and_update, state=[*state, optimizer])

    def _prevent(self, reason: str) -> None:
        """From the next batch on steps are recorded."""
        if self._reason is None:
            self._reason = reason
            captured.report(reason)

    def _call(self, batch: Any, *settings: Any) -> Any:
        """Lightning's step of a batch; what it returns, and what it logs.  It is counted afterwards."""
        given, counts = self._given, self.optim_progress.optimizer.state_dict()
        module: Any = self.trainer.lightning_module
        logged: list[tuple[str, str, Any, dict[str, Any]]] = []
        module.log = functools.partial(self._log, module, logged)
        try:
            values = {"batch": batch, "batch_idx": given.index}
            kwargs = type(given.kwargs)((name, values.get(name, value)) for name, value in given.kwargs.items())
            result = super().run(given.optimizer, given.batch_idx, kwargs)
        finally:
            del module.log
            self.optim_progress.optimizer.load_state_dict(counts)
        return result, logged

    def _call_and_update(self, batch: Any, *settings: Any) -> Any:
        """The same, with the optimizer's step."""
        return self._call(batch, *settings)

    def _optimizer_step(self, batch_idx: int, closure: Any) -> None:
        super()._optimizer_step(batch_idx if self._given is None else self._given.index, closure)

    def _optimizer_zero_grad(self, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        super()._optimizer_zero_grad(batch_idx if self._given is None else self._given.index, optimizer)

    def _log(self, module: Any, logged: list[Any], name: str, value: Any, *args: Any, **options: Any) -> None:
        if not isinstance(value, torch.Tensor):
            self._prevent(
                f"{name!r} is logged as a {type(value).__name__}; log a tensor, or log it in on_train_batch_end"
            )
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        value = value.detach() if isinstance(value, torch.Tensor) else value
        logged.append((module._current_fx_name, name, value, {**dict(zip(names, args, strict=False)), **options}))

    def _count(self, first: bool, last: bool) -> None:
        """What Lightning counts in a step."""
        progress = self.optim_progress.optimizer
        if first:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
            progress.zero_grad.increment_completed()
        if last:
            progress.step.increment_ready()
            progress.step.increment_completed()


class _Index(int):
    """The number of a batch, which a replay would not change: tells when Python reads it."""

    _told: Callable[[str], None]

    def __new__(cls, value: int, told: Callable[[str], None]) -> _Index:
        self = super().__new__(cls, value)
        self._told = told
        return self


def _telling(name: str) -> Any:
    def method(self: _Index, *args: Any) -> Any:
        self._told("its code reads batch_idx, which changes with each batch")
        return getattr(int, name)(self, *args)

    return method


for _name in (
    *("bool", "eq", "ne", "lt", "le", "gt", "ge", "hash", "add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod"),
    *("floordiv", "rfloordiv", "truediv", "rtruediv", "pow", "rpow", "divmod", "neg", "float", "index"),
    *("str", "repr", "format"),
):
    setattr(_Index, f"__{_name}__", _telling(f"__{_name}__"))
