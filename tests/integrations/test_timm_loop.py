"""A loop as timm's train.py has it: a training step and an evaluation compile once."""

from __future__ import annotations

import torch
from torch import nn

import xla_amp


class NativeScaler:
    """timm's, without its arguments for second derivatives and accumulation."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("jax")

    def __call__(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self._scaler.step(optimizer)
        self._scaler.update()


def test_a_training_has_one_program_and_an_evaluation_two() -> None:
    """Nine batches of each; the first batches of an evaluation that reads nothing are one program."""
    device = xla_amp.xla_device()
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Flatten(), nn.Linear(7 * 36, 5)).to(
        device
    )
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True), NativeScaler()
    batches = [(torch.rand(4, 3, 8, 8), torch.arange(4)) for _ in range(9)]
    xla_amp.sync(wait=True)
    xla_amp.metrics.reset()
    optimizer.zero_grad()
    for index, (images, labels) in enumerate(batches):
        images, labels = images.to(device), labels.to(device)
        with torch.autocast("jax", torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler(loss, optimizer, list(model.parameters()))
        optimizer.zero_grad()
        if index % 4 == 0:
            assert loss.item() > 0
    xla_amp.sync()
    assert (xla_amp.metrics()["compilations"], xla_amp.metrics()["executions"]) == (1, 9)
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in batches:
            with torch.autocast("jax", torch.float16):
                right += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    assert 0 <= int(right) <= 36
    assert xla_amp.metrics()["compilations"] <= 3
