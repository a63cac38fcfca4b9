"""What the trainings of all frameworks share: data of three classes, layers that learn them, and what steps cost."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import xla_amp


def rows(count: int, bad: int | None = None) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    if bad is not None:
        x[bad] = math.inf
    return TensorDataset(x, y)


def layers(dropout: float = 0.0) -> nn.Sequential:
    between = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), *between, nn.Linear(16, 3))


class Classifier(nn.Module):
    """Those layers with the forward pass that transformers' Trainer calls."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = layers(dropout)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def counted() -> tuple[int, int, int]:
    """Executions, host syncs and compilations since the last call."""
    xla_amp.sync()
    counts = xla_amp.metrics()
    xla_amp.metrics.reset()
    return counts["executions"], counts["host_syncs"], counts["compilations"]


BAD = 20  # in the second batch of the third step, where two batches of four make one


def check_monitor(recorder: Any, train: Callable[[Any], nn.Module]) -> None:
    """In two trainings of four steps, with :data:`BAD`."""
    for _ in range(2):
        before = getattr(recorder, "monitor", None)
        model = train(recorder)
        assert recorder.monitor is not before
        history = recorder.monitor.history
        assert history.of("step") == [0, 1, 2, 3]
        assert [math.isfinite(loss) for loss in history.of("loss")[:3]] == [True, True, False]
        assert history.of("bad")[:3] == [False, False, True]
        assert set(history.steps[2].nonfinite) == {name for name, _ in model.named_parameters()}
        assert "body.0" in history.steps[0].largest
