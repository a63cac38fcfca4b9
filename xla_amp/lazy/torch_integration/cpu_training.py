"""Tell once that a model trains on the CPU although the process has started the device.

A training framework that does not know the device puts the model on the CPU and trains there, without a word.
"""

from __future__ import annotations

import weakref

import torch

from xla_amp.common import config, events

LEAST_ELEMENTS = 100_000
"""Parameters of a model that is worth a device; smaller ones may be on the CPU on purpose."""
STEPS = 10
"""Steps of one optimizer after which this is a training and not a comparison."""

_watching = True
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def device_was_used() -> None:
    """An optimizer has stepped parameters on the device: the program knows what is where."""
    global _watching
    _watching = False
    _steps.clear()


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Counts a step of an optimizer whose first parameter is not on the device; warns at the `STEPS`-th."""
    global _watching
    if not _watching:
        return
    count = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if count < STEPS:
        return
    del _steps[optimizer]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    elements = sum(p.numel() for p in parameters)
    if elements < LEAST_ELEMENTS or any(p.device.type != "cpu" for p in parameters):
        return
    device_was_used()
    if config.warns_of_cpu_training():
        events.warn(
            f"{type(optimizer).__name__} has made {STEPS} steps on {elements} parameters that are on the CPU, and none "
            "has been made on the XLA device that this program started. Move the model with "
            "model.to(xla_amp.xla_device()) before the optimizer is built, or tell the framework the device; "
            f"{config.CPU_TRAINING}=allow silences this",
        )
