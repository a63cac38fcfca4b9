"""Restore training state after trial calls of a step: Python objects, device buffers, and the random state."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch.optim import Optimizer

from xla_amp.lazy.capture.guards import Guards
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs.compile import Program
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import generator


@contextlib.contextmanager
def restored_state(guards: Guards) -> Iterator[None]:
    """Restores gradients, optimizers, scalers, tensors and the random state after trial calls of a step.

    Args:
        guards: of the step.
    """
    gradients = [(parameter, parameter.grad) for parameter in guards.parameters]
    optimizers = [(optimizer, _OptimizerState(optimizer)) for optimizer in guards.optimizers]
    scalers = [(scaler, _attributes(scaler)) for scaler in guards.scalers]
    with _restored_buffers():
        try:
            yield
        finally:
            for parameter, grad in gradients:
                parameter.grad = grad
            for optimizer, saved in optimizers:
                saved.restore(optimizer)
            for scaler, attributes in scalers:
                vars(scaler).clear()
                vars(scaler).update(attributes)


class _OptimizerState:
    """A copy of an optimizer's options and state; tensors of the device are restored with their buffers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._attributes = {k: v for k, v in _attributes(optimizer).items() if k not in ("state", "param_groups")}
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {key: _copy_host_values(state) for key, state in optimizer.state.items()}

    def restore(self, optimizer: Optimizer) -> None:
        """Puts the copy into the optimizer."""
        state, groups = optimizer.state, optimizer.param_groups
        vars(optimizer).update(self._attributes)
        state.clear()
        state.update(self._state)
        for group, before in zip(groups, self._groups, strict=True):
            group.clear()
            group.update(before)


def _attributes(instance: object) -> dict[str, Any]:
    return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(instance).items()}


def _copy_host_values(state: Any) -> Any:
    """A copy of one parameter's state that shares no host memory with it."""
    if not isinstance(state, dict):
        return copy.copy(state)
    return {
        key: value.clone() if isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE else value
        for key, value in state.items()
    }


@contextlib.contextmanager
def _restored_buffers() -> Iterator[None]:
    """Restores each existing buffer and the random state after the programs that run inside."""
    execute.flush()
    copies, outer, state = _InputCopies(), execute.observer, generator.state()
    execute.observer = copies
    try:
        yield
        execute.flush()
    finally:
        execute.observer = outer
        for reference, array in copies.values.values():
            if (buffer := reference()) is not None:
                buffer.array, buffer.number = array, -1
        generator.set_state(*state)


class _InputCopies:
    """An observer that copies the inputs that programs overwrite, since donation needs the originals."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[weakref.ref[Buffer], jax.Array]] = {}

    def before(self, parameters: list[Buffer], held: list[bool]) -> None:
        """Copies parameters that get a new value, when they first do."""
        for parameter, number in zip(parameters, trace.parameter_numbers, strict=True):
            if parameter.number != number and isinstance(parameter.array, jax.Array):
                reference, _ = self.values.get(id(parameter), (None, None))
                if reference is None or reference() is not parameter:  # a new buffer may have a freed one's address
                    self.values[id(parameter)] = weakref.ref(parameter), parameter.array.copy()

    def after(self, program: Program, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """Does nothing: results are overwritten in the end."""
