"""Models that the benchmarks train, at any width, in plain PyTorch: ResNet-50, GPT, BERT, ViT, a UNet and an LSTM.

Each takes a batch and returns the loss.  `flax_models.py` has them in Flax, but for the UNet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """The residual block of ResNet-50 (He et al. 2015), stride on the 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50: images ``f32[batch, 3, height, width]`` to logits ``[batch, classes]``.

    Args:
        width: channels of the first stage (64 in the paper).
        classes: number of logits.
        blocks: number of blocks per stage; fewer entries give the first stages of a ResNet-50.
    """

    def __init__(self, width: int = 64, classes: int = 1000, blocks: Sequence[int] = (3, 4, 6, 3)) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        inputs = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
                inputs = 4 * (width << stage)
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.features(images), 1).flatten(1)
        return F.cross_entropy(self.head(pooled), labels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes common to all transformers."""

    width: int = 768
    heads: int = 12
    layers: int = 12
    dropout: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """Sizes of a GPT; the defaults are GPT-2 124M."""

    vocabulary: int = 50257
    context: int = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class BERTConfig(GPTConfig):
    """Sizes of a BERT; the defaults are BERT-base."""

    vocabulary: int = 30522
    context: int = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(TransformerConfig):
    """Sizes of a vision transformer; the defaults are ViT-B/16."""

    side: int = 224
    patch: int = 16
    classes: int = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSTMConfig:
    """Sizes of an LSTM language model; the defaults are the medium model of Zaremba et al. 2014."""

    vocabulary: int = 10000
    width: int = 650
    layers: int = 2


class Block(nn.Module):
    """A transformer block: causal or not, its norms before or after each part."""

    def __init__(self, config: TransformerConfig, *, causal: bool = False, before: bool = True) -> None:
        super().__init__()
        width = config.width
        self.heads, self.causal, self.before = config.heads, causal, before
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def attention(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = (batch, time, self.heads, width // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, time, width)))

    def perceptron(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attention(self.norm1(x))
            return x + self.perceptron(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.perceptron(x))


class _TokenModel(nn.Module):
    """A transformer over tokens with tied embeddings; `enter` and `leave` are called before and after its blocks."""

    def __init__(self, config: GPTConfig, enter: nn.Module, leave: nn.Module, *, causal: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.enter, self.leave = enter, leave
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, causal=causal, before=causal) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.enter(self.tokens(tokens) + self.positions(positions)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.leave(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class GPT(_TokenModel):
    """A GPT: tokens and targets ``i64[batch, time]`` to the mean cross-entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config, nn.Identity(), nn.LayerNorm(config.width), causal=True)


class BERT(_TokenModel):
    """A BERT that fills in masked tokens: tokens and targets ``i64[batch, time]`` to the mean cross-entropy."""

    def __init__(self, config: BERTConfig) -> None:
        width = config.width
        transform = nn.Sequential(nn.Linear(width, width), nn.GELU(approximate="tanh"), nn.LayerNorm(width))
        super().__init__(config, nn.LayerNorm(width), transform, causal=False)


class ViT(nn.Module):
    """A vision transformer: images ``f32[batch, 3, side, side]`` and labels to the mean cross-entropy."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.first = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (config.side // config.patch) ** 2 + 1, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.dropout(torch.cat([self.first.expand(len(x), -1, -1).to(x.dtype), x], 1) + self.positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), labels)


class _Residual(nn.Module):
    """A residual block of a diffusion UNet, with attention over pixels at its end if it has heads."""

    def __init__(self, inputs: int, outputs: int, times: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(times, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        if heads:
            self.norm3, self.qkv = nn.GroupNorm(32, outputs), nn.Linear(outputs, 3 * outputs)
            self.project = nn.Linear(outputs, outputs)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        x = self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))
        if not self.heads:
            return x
        batch, width, height, _ = x.shape
        pixels = self.norm3(x).flatten(2).transpose(1, 2)
        parts = self.qkv(pixels).view(batch, -1, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        return x + self.project(mixed).transpose(1, 2).unflatten(2, (height, -1))


class UNet(nn.Module):
    """A denoiser of images as diffusers has them: two blocks a level down and three up, attention below the first."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        self.width, times = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        sizes, widths, now = [width], [width * min(1 << level, 4) for level in range(levels)], width
        self.down, self.up, self.shrink, self.grow = (nn.ModuleList() for _ in range(4))
        for level, size in enumerate(widths):
            for _ in range(2):
                self.down.append(_Residual(now, size, times, 4 if level else 0))
                now = size
                sizes.append(now)
            if level < levels - 1:
                self.shrink.append(nn.Conv2d(now, now, 3, 2, 1))
                sizes.append(now)
        self.middle = _Residual(now, now, times, 4)
        for level, size in reversed(list(enumerate(widths))):
            for _ in range(3):
                self.up.append(_Residual(now + sizes.pop(), size, times, 4 if level else 0))
                now = size
            if level:
                self.grow.append(nn.Conv2d(now, now, 3, padding=1))
        self.norm, self.leave = nn.GroupNorm(32, now), nn.Conv2d(now, 3, 3, padding=1)

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        angles = steps[:, None] * torch.logspace(0, -4, self.width // 2, device=steps.device)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.enter(images)
        kept = [x]
        for number, block in enumerate(self.down):
            x = block(x, time)
            kept.append(x)
            if number % 2 and number // 2 < len(self.shrink):
                x = self.shrink[number // 2](x)
                kept.append(x)
        x = self.middle(x, time)
        for number, block in enumerate(self.up):
            x = block(torch.cat([x, kept.pop()], 1), time)
            if number % 3 == 2 and number // 3 < len(self.grow):
                x = self.grow[number // 3](F.interpolate(x, scale_factor=2.0))
        return F.mse_loss(self.leave(F.silu(self.norm(x))), images)


class LSTM(nn.Module):
    """An LSTM language model: tokens and targets ``i64[batch, time]`` to the mean cross-entropy."""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.lstm = nn.LSTM(config.width, config.width, config.layers, batch_first=True)
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.lstm(self.tokens(tokens))[0])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
