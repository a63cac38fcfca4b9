"""Small networks and the loop that trains one, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.0)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


class Transformer(nn.Module):
    """One pre-norm block with causal attention between an embedding and a tied head: i64[B, T] -> f32[B, T, 48]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(48, 32)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(32), nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.project = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, 4, 8).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, time, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x))


Data = tuple[Tensor, Tensor]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Data]]] = {
    "mlp": (mlp, lambda: (torch.randn(16, 20), torch.randint(5, (16,)))),
    "convnet": (convnet, lambda: (torch.randn(8, 3, 16, 16), torch.randint(10, (8,)))),
    "transformer": (Transformer, lambda: (torch.randint(48, (4, 12)), torch.randint(48, (4, 12)))),
}
"""Name -> (makes the network, makes a batch)."""


def build(name: str, device: torch.device | str, batches: int = 4) -> tuple[nn.Module, list[Data]]:
    """The network and batches of one seed, on `device`."""
    torch.manual_seed(0)
    make, data = NETWORKS[name]
    model = make().to(device)
    return model, [tuple(tensor.to(device) for tensor in data()) for _ in range(batches)]  # type: ignore[misc]


def loss_of(model: nn.Module, batch: Data) -> Tensor:
    logits, targets = model(batch[0]), batch[1]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def losses(values: Sequence[Tensor]) -> list[float]:
    """The losses of a run, read at its end."""
    return torch.stack(list(values)).tolist()
