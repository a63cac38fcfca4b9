"""Restore training state after trial calls of a step: Python objects, device buffers, and the random state."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xla_amp.backends.step_state import StepState
from xla_amp.errors import CaptureError
from xla_amp.lazy.graph.trace import Buffer, trace
from xla_amp.lazy.programs import execute


@contextlib.contextmanager
def restored_state(owners: list[Any], parameters: list[torch.Tensor]) -> Iterator[None]:
    """Restores gradients, optimizers, scalers, tensors and the random state after trial calls of a step.

    Args:
        owners: modules, optimizers and scalers of its state.
        parameters: of its state.

    Raises:
        CaptureError: another optimizer is about to step.
    """
    execute.flush()
    copies, state = _InputCopies(), StepState(owners, parameters)

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if not any(optimizer is each for each in owners):
            optimizer.zero_grad()
            raise CaptureError(
                f"warm_up() restores the state that is declared, and the step uses another {type(optimizer).__name__}; "
                "name it: compile(step, state=[model, optimizer])"
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        with execute.flush_begins.subscribed(copies.before):
            yield
            execute.flush()
    finally:
        hook.remove()
        copies.restore()
        state.restore()


class _InputCopies:
    """Copies of the inputs that programs overwrite, since donation needs the originals."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Buffer], jax.Array]] = {}

    def before(self, parameters: list[Buffer], held: list[bool]) -> None:
        """Before a flush: copies parameters that get a new value, when they first do."""
        for parameter, number in zip(parameters, trace.parameter_numbers, strict=True):
            if parameter.number != number and isinstance(parameter.array, jax.Array):
                reference, _ = self._values.get(id(parameter), (None, None))
                if reference is None or reference() is not parameter:  # a new buffer may have a freed one's address
                    self._values[id(parameter)] = weakref.ref(parameter), parameter.array.copy()

    def restore(self) -> None:
        """Gives each buffer that exists its copy."""
        for reference, array in self._values.values():
            if (buffer := reference()) is not None:
                buffer.array, buffer.number = array, -1
