"""A step of transformers' Trainer as a captured step: `huggingface.enable(capture=True)`.

The Trainer calls ``training_step`` for each micro-batch, and after the last one ``_clip_grad_norm`` and the optimizer's
``step``.  Here ``training_step`` of the last micro-batch does all of it in one captured call; what the Trainer calls
afterwards returns what that call has computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, masking_utils

from xla_amp.engines import devices
from xla_amp.integrations import captured
from xla_amp.lazy.capture.compiled_step import compile

_HOOKS = ("on_pre_optimizer_step", "on_optimizer_step")
_METHODS = ("training_step", "compute_loss", "compute_loss_func", "compute_loss_context_manager")
"""What the Trainer calls of its own in a step, where users have written another one."""


class CapturedTraining:
    """Context of one training of `trainer`, whose steps are captured.

    Args:
        trainer: its methods are replaced inside.
        finite: replaces a loss that is not finite, outside of the captured step.
    """

    def __init__(self, trainer: Trainer, finite: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        self._trainer: Any = trainer
        self._finite = finite
        self._optimizers: list[Any] = [None]  # in a list: a micro-batch does not depend on the optimizer's numbers
        self._replaced: list[tuple[Any, str, Any]] = []
        self._part: Any = None
        self._step: Any = None
        self._norm: torch.Tensor | None = None

    def __enter__(self) -> None:
        self._trainer.training_step = self.training_step

    def __exit__(self, *_: object) -> None:
        self._release()
        del self._trainer.training_step

    def _release(self) -> None:
        for owner, name, before in self._replaced:
            vars(owner).pop(name)
            vars(owner).update({} if before is None else {name: before})
        self._replaced = []

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> Any:
        """Replaces a method of one object until `_release`; returns it."""
        before = getattr(owner, name)
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, functools.wraps(before)(function))  # a schedule looks at attributes of `step`
        return before

    def _begin(self, model: torch.nn.Module) -> None:
        """Makes the captured step of this optimizer, unless something prevents it."""
        trainer = self._trainer
        self._release()
        self._optimizers, self._step = [trainer.optimizer], None
        reason = captured.obstacle(trainer.callback_handler.callbacks, TrainerCallback, _HOOKS)
        if "lomo" in str(trainer.args.optim):
            reason = f"the optimizer {trainer.args.optim} updates parameters in the backward pass"
        if reason is not None:
            captured.report(reason)
            return
        code = captured.code(trainer, Trainer, _METHODS)
        state = [model, *filter(None, [trainer.accelerator.scaler]), *code]
        self._part = compile(self._backward, state=state)
        self._step = compile(self._whole, state=[*state, trainer.optimizer])

        def on_device(tensor: Any) -> bool:
            return isinstance(tensor, torch.Tensor) and devices.is_xla(tensor.device.type)

        # Masks are made without reading whether anything is masked; the others do what the captured step has done.
        before = self._replace(masking_utils, "is_tracing", lambda tensor=None: on_device(tensor) or before(tensor))
        self._replace(trainer, "_clip_grad_norm", lambda model: None)
        self._replace(trainer, "_get_grad_norm", lambda model, grad_norm=None: self._norm)
        self._update = self._replace(trainer.optimizer, "step", lambda closure=None: None)

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """``Trainer.training_step``, and after the last micro-batch the optimizer's step."""
        trainer = self._trainer
        if trainer.optimizer is not self._optimizers[0]:
            self._begin(model)
        if self._step is None:
            loss = type(trainer).training_step(trainer, model, inputs, num_items_in_batch)
        else:
            model.train()
            given = model, dict(trainer._prepare_inputs(inputs)), num_items_in_batch
            parts = trainer.current_gradient_accumulation_steps
            if trainer.accelerator.sync_gradients:
                loss, self._norm = self._step(*given, parts)
            else:
                loss = self._part(*given, parts)
        return self._finite(trainer, loss)

    def _backward(self, model: torch.nn.Module, batch: dict[str, Any], items: Any, parts: int) -> torch.Tensor:
        """One of `parts` micro-batches."""
        loss: torch.Tensor = type(self._trainer).training_step(self._trainer, model, dict(batch), items)
        return loss

    def _whole(self, model: torch.nn.Module, batch: dict[str, Any], items: Any, parts: int) -> Any:
        """The last of `parts` micro-batches, and the optimizer's step."""
        loss, trainer = self._backward(model, batch, items, parts), self._trainer
        methods = type(trainer)
        norm = methods._clip_grad_norm(trainer, model) if trainer.args.max_grad_norm > 0 else None
        norm = methods._get_grad_norm(trainer, model, grad_norm=norm)
        self._update()
        model.zero_grad()
        return loss, norm
