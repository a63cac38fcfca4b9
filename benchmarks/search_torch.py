"""The programs of `search_programs.py` in PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from models import Bottleneck
from torch import Tensor, nn
from workloads import Workload, language, resnet, vit


class NearlyEqual(nn.Module):
    """The difference of two products that are nearly equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.b.weight.data = self.a.weight.data * 1.01

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.a(x) - self.b(x)).square().mean()


class LargeMeans(nn.Module):
    """Batch norms of values whose mean is large beside their deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.middle = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)
        self.second, self.leave = nn.BatchNorm2d(16), nn.Linear(16, 10)
        nn.init.constant_(self.enter.bias, 100.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.norm(self.enter(x)))
        return F.cross_entropy(self.leave(F.relu(self.second(self.middle(x))).mean((2, 3))), y)


class Positions(nn.Module):
    """The angles of rotary positions, of which a low dtype has only some."""

    def forward(self, at: Tensor, rates: Tensor) -> Tensor:
        return at[:, None] @ rates[None]


class Rotary(nn.Module):
    """Attention with rotary positions up to 4096."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.positions = Positions()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, width, 2) / width))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        angles = self.positions(at, self.rates)
        cos, sin = angles.cos(), angles.sin()

        def turned(values: Tensor) -> Tensor:
            even, odd = values[..., ::2], values[..., 1::2]
            return torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1)

        attended = F.scaled_dot_product_attention(turned(self.query(x)) * 4, turned(self.key(x)), self.value(x))
        return self.out(attended).square().mean()


class Head(nn.Module):
    """A large head whose loss is a log-sum-exp."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(512, 64), nn.Linear(64, 64), nn.Linear(64, 512)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = 8 * self.head(F.gelu(self.hidden(self.embed(x))))
        chosen = logits.gather(-1, y[:, None]).squeeze(-1)
        return (torch.logsumexp(logits, -1) - chosen).mean() + 1e-4 * torch.logsumexp(logits, -1).square().mean()


class Expert(nn.Module):
    """A feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """A mixture of experts: a rounded router chooses others."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.enter, self.router, self.leave = nn.Linear(width, width), nn.Linear(width, experts), nn.Linear(width, 10)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        share, chosen = torch.softmax(self.router(x), -1).topk(2)
        weights = torch.zeros_like(x[:, : len(self.experts)]).scatter(-1, chosen, share.to(x.dtype))
        mixed = sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return F.cross_entropy(self.leave(x + mixed), y)


class UNet(nn.Module):
    """A denoiser with one level, a time embedding and a skip."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time, self.enter = nn.Linear(16, width), nn.Conv2d(3, width, 3, padding=1)
        self.norm, self.down = nn.GroupNorm(4, width), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle, self.middle_norm = nn.Conv2d(2 * width, 2 * width, 3, 1, 1), nn.GroupNorm(4, 2 * width)
        self.up, self.leave = nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor, noise: Tensor, at: Tensor) -> Tensor:
        angles = at[:, None] * torch.arange(1, 9)
        time = self.time(torch.cat((angles.sin(), angles.cos()), -1))[:, :, None, None]
        mixed = at.cos()[:, None, None, None] * x + at.sin()[:, None, None, None] * noise
        high = F.silu(self.norm(self.enter(mixed) + time))
        deep = F.silu(self.middle_norm(self.middle(self.down(high))))
        return F.mse_loss(self.leave(torch.cat((high, self.up(deep)), 1)), noise)


class Overflow(nn.Module):
    """A product outside of the range of float16, between products inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.large, self.small, self.last = (nn.Linear(32, 32) for _ in range(4))
        self.large.weight.data *= 3e5
        self.small.weight.data *= 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.small(self.large(self.first(x))))).square().mean()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program in PyTorch."""

    model: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Any]

    def make(self, batches: int) -> tuple[nn.Module, list[Any]]:
        """The model, which returns the loss, and its batches."""
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        data = [self.data(generator) for _ in range(batches)]
        return self.model(), data


def _of(fields: Mapping[str, Any], change: Callable[[nn.Module], None] = lambda model: None) -> Row:
    workload = Workload(name="", **fields)

    def make() -> nn.Module:
        model = workload.torch_model()
        change(model)
        return model

    def data(generator: torch.Generator) -> Any:
        x, y = workload.data(np.random.default_rng(int(torch.randint(2**31, (), generator=generator))))
        return torch.from_numpy(x), torch.from_numpy(y)

    return Row(model=make, data=data)


def _residual(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Bottleneck):
            nn.init.zeros_(module.norm3.weight)  # otherwise the gradients of the first step are chaotic


def _normal(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], Any]:
    return lambda generator: tuple(torch.randn(shape, generator=generator) for shape in shapes)


def _labelled(shape: tuple[int, ...], classes: int) -> Callable[[torch.Generator], Any]:
    return lambda g: (torch.randn(shape, generator=g), torch.randint(classes, shape[:1], generator=g))


def _tokens(number: int) -> Callable[[torch.Generator], Any]:
    return lambda g: tuple(torch.randint(512, (number,), generator=g) for _ in range(2))


def _rotary(generator: torch.Generator) -> Any:
    at = torch.randperm(4096, generator=generator)[:64].sort().values.float()
    return torch.randn(4, 64, 32, generator=generator), at


def _noised(generator: torch.Generator) -> Any:
    images = (torch.randn(4, 3, 16, 16, generator=generator) for _ in range(2))
    return *images, torch.rand(4, generator=generator) * 1.5


_SIZE: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4}
GPT = language(2, 32, vocabulary=256, context=32, **_SIZE)
BERT = language(2, 32, "BERT", vocabulary=256, context=32, **_SIZE)
VIT = vit(2, side=64, classes=10, **_SIZE)
LSTM = language(4, 16, "LSTM", vocabulary=128, width=32)
RESNET = resnet(4, 32, width=8, classes=10, blocks=(1, 1, 1, 1))

PROGRAMS: dict[str, Row] = {
    "nearly equal": Row(model=NearlyEqual, data=_normal((16, 64))),
    "batch norm": Row(model=LargeMeans, data=_labelled((8, 3, 16, 16), 10)),
    "RoPE": Row(model=Rotary, data=_rotary),
    "log-sum-exp": Row(model=Head, data=_tokens(64)),
    "LSTM": _of(LSTM),
    "MoE": Row(model=Mixture, data=_labelled((64, 32), 10)),
    "GPT-2": _of(GPT),
    "ResNet": _of(RESNET, _residual),
    "ViT": _of(VIT),
    "BERT": _of(BERT),
    "UNet": Row(model=UNet, data=_noised),
    "overflow": Row(model=Overflow, data=_normal((16, 32))),
}
