"""The warning about a model that trains on the CPU although the program has started the device."""

from __future__ import annotations

import weakref

import torch

from xla_amp.common import events
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs.metrics import metrics

LEAST_ELEMENTS = 100_000
"""Parameters of a model that is worth a device; smaller ones may be on the CPU on purpose beside work on the device."""
STEPS = 10
"""Steps of one optimizer after which this is a training and not a comparison."""

_counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""Steps of optimizers whose first parameter is not on the device."""


def forget() -> None:
    """Drops the counts."""
    _counts.clear()


def is_told(optimizer: torch.optim.Optimizer) -> bool:
    """Counts a step of an optimizer whose first parameter is not on the device; whether it warns, at the `STEPS`-th."""
    count = _counts[optimizer] = _counts.get(optimizer, 0) + 1
    if count < STEPS:
        return False
    del _counts[optimizer]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    elements = sum(p.numel() for p in parameters)
    device_works = trace.count > 0 or metrics.executions > 0 or metrics.host_to_device > 0
    if (device_works and elements < LEAST_ELEMENTS) or any(p.device.type != "cpu" for p in parameters):
        return False
    events.warn(
        f"{type(optimizer).__name__} has made {STEPS} steps on {elements} parameters that are on the CPU, and none has "
        "been made on the XLA device that this program started. Move the model with model.to(xla_amp.xla_device()) "
        "before the optimizer is built, or tell the framework the device"
    )
    return True
