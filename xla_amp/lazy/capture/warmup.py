"""Taking back what calls of a step did to Python's part of the training state."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from xla_amp.lazy.capture.dry_run import rehearsal
from xla_amp.lazy.capture.guards import Surroundings
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE


@contextlib.contextmanager
def without_a_trace(around: Surroundings) -> Iterator[None]:
    """Inside, a step may be called; afterwards its gradients, optimizers, scalers and tensors are as before.

    Args:
        around: what the step sees.
    """
    grads = [(parameter, parameter.grad) for parameter in around.parameters]
    optimizers = [(found, _Optimizer(found)) for found in around.found if isinstance(found, Optimizer)]
    others = [(found, _attributes(found)) for found in around.found if not isinstance(found, Optimizer)]
    with rehearsal():
        try:
            yield
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
            for optimizer, saved in optimizers:
                saved.put_back(optimizer)
            for found, attributes in others:
                vars(found).clear()
                vars(found).update(attributes)


class _Optimizer:
    """An optimizer's options and state; tensors of the device are the engine's to restore."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._attributes = {k: v for k, v in _attributes(optimizer).items() if k not in ("state", "param_groups")}
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {key: _on_host(state) for key, state in optimizer.state.items()}

    def put_back(self, optimizer: Optimizer) -> None:
        state, groups = optimizer.state, optimizer.param_groups
        vars(optimizer).update(self._attributes)
        state.clear()
        state.update(self._state)
        for group, before in zip(groups, self._groups, strict=True):
            group.clear()
            group.update(before)


def _attributes(found: Any) -> dict[str, Any]:
    return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(found).items()}


def _on_host(state: Any) -> Any:
    """A copy of one parameter's state in which what the host computes with has memory of its own."""
    if not isinstance(state, dict):
        return copy.copy(state)
    return {
        key: value.clone() if isinstance(value, torch.Tensor) and value.device.type != DEVICE_TYPE else value
        for key, value in state.items()
    }
