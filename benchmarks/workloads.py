"""Workloads of the benchmarks: models at sizes to try, for host time, for a small CPU, and as published for one GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import models
import numpy as np
import torch

Size = Literal["dry", "tiny", "small", "first", "full"]


def _images(batch: int, side: int, classes: int) -> Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]:
    return lambda rng: (rng.standard_normal((batch, 3, side, side), np.float32), rng.integers(classes, size=batch))


def _tokens(batch: int, time: int, vocabulary: int) -> Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]:
    return lambda rng: tuple(rng.integers(vocabulary, size=(2, batch, time)))  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and a batch."""

    name: str
    shape: str
    """The batch, as text for tables."""
    model: str
    """Name of a class in `models` and in `flax_models`."""
    options: Mapping[str, Any]
    """Arguments of both classes."""
    data: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]
    """NCHW images or tokens, and labels (int64)."""
    optimizer: Literal["sgd", "adamw"]

    def torch_model(self) -> torch.nn.Module:
        """The model in PyTorch, with the weights of seed 0."""
        torch.manual_seed(0)
        made: torch.nn.Module = getattr(models, self.model)(**self.options)
        return made

    def flax_model(self, dtype: Any = None) -> Any:
        """The same model in Flax; `dtype` is Flax's argument for mixed precision."""
        import flax_models

        return getattr(flax_models, self.model)(**self.options, **({} if dtype is None else {"dtype": dtype}))

    def torch_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch as CPU tensors."""
        x, y = self.data(np.random.default_rng(0))
        return torch.from_numpy(x), torch.from_numpy(y)

    def flax_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """The batch as NHWC images or int32 tokens."""
        x, y = self.data(np.random.default_rng(0))
        return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x.astype(np.int32), y.astype(np.int32)


def _row(model: str, config: Any, shape: str, data: Any) -> dict[str, Any]:
    sizes = f"{shape}, {config.layers} layers, width {config.width}"
    return {"model": model, "shape": sizes, "options": {"config": config}, "data": data, "optimizer": "adamw"}


def language(batch: int, time: int, model: str = "GPT", **sizes: Any) -> dict[str, Any]:
    """All fields of a workload except its name: a token model of `models`, with ``sizes`` for its config."""
    config = getattr(models, f"{model}Config")(**sizes)
    return _row(model, config, f"{batch} x {time} tokens", _tokens(batch, time, config.vocabulary))


def vit(batch: int, **sizes: Any) -> dict[str, Any]:
    """All fields of a workload except its name: a vision transformer, with ``sizes`` for its config."""
    config = models.ViTConfig(**sizes)
    data = _images(batch, config.side, config.classes)
    return _row("ViT", config, f"{batch} images of {config.side} px", data)


def resnet(
    batch: int, side: int, width: int = 64, classes: int = 1000, blocks: Sequence[int] = (3, 4, 6, 3)
) -> dict[str, Any]:
    """All fields of a workload except its name: ResNet-50 on square images."""
    return {
        "model": "ResNet50",
        "shape": f"{batch} images of {side} px, width {width}",
        "options": {"width": width, "classes": classes, "blocks": tuple(blocks)},
        "data": _images(batch, side, classes),
        "optimizer": "sgd",
    }


WORKLOADS: Mapping[Size, Mapping[str, Workload]] = {
    size: {name: Workload(name=name, **row) for name, row in rows.items()}
    for size, rows in {
        # One layer of each: whether a peer works.
        "dry": {
            "ResNet-50": resnet(2, 32, width=4, classes=10, blocks=(1, 1, 1, 1)),
            "GPT-2": language(2, 8, vocabulary=64, context=8, width=24, layers=1),
            "BERT": language(2, 8, "BERT", vocabulary=64, context=8, width=24, layers=1),
            "ViT": vit(2, side=32, width=24, layers=1),
        },
        # The published graphs with almost no arithmetic: what remains is host time.
        "tiny": {
            "ResNet-50": resnet(2, 32, width=4, classes=10),
            "GPT-2": language(2, 8, vocabulary=64, context=8, width=24),
        },
        # Steps of tenths of a second on two cores: real graphs, narrow or shallow.
        "small": {
            "ResNet-50": resnet(8, 96),
            "GPT-2": language(2, 256, vocabulary=8192, context=256, layers=2),
            "BERT": language(4, 128, "BERT", vocabulary=8192, context=128, layers=2),
            "ViT": vit(4, side=112, layers=2),
            "LSTM": language(8, 32, "LSTM", vocabulary=4096, width=512),
        },
        # First steps of a run: graphs from small to large.
        "first": {
            "ConvNet": resnet(8, 64, blocks=(3, 3, 3, 3)),
            "ResNet-50": resnet(8, 96),
            "GPT-2": language(2, 128, vocabulary=8192, context=128, layers=2),
            "GPT-2 of 12 layers": language(2, 128, vocabulary=8192, context=128, layers=12),
            "BERT": language(4, 128, "BERT", vocabulary=8192, context=128, layers=2),
            "ResNet, 1 block a stage": resnet(8, 64, blocks=(1, 1, 1, 1)),
            "UNet": {
                "model": "UNet",
                "shape": "2 images of 32 px, 4 levels, width 64",
                "options": {},
                "data": _images(2, 32, 1000),
                "optimizer": "adamw",
            },
        },
        "full": {
            "ResNet-50": resnet(256, 224),
            "GPT-2": language(16, 1024),
            "BERT": language(32, 512, "BERT"),
            "ViT": vit(128),
            "LSTM": language(64, 128, "LSTM"),
        },
    }.items()
}
"""Size -> name -> workload: to try, for host time, a small CPU, first steps, and published sizes for one GPU."""
