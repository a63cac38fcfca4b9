"""What the trainings of all frameworks share: data of three classes, layers that learn them, and what steps cost."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import xla_amp


def rows(count: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def layers(dropout: float = 0.0) -> nn.Sequential:
    between = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), *between, nn.Linear(16, 3))


def counted() -> tuple[int, int, int]:
    """Executions, host syncs and compilations since the last call."""
    xla_amp.sync()
    counts = xla_amp.metrics()
    xla_amp.metrics.reset()
    return counts["executions"], counts["host_syncs"], counts["compilations"]
