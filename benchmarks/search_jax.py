"""The programs of `search_programs.py` in JAX: losses of Flax modules, and the same as StableHLO modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax_models import cross_entropy
from search_torch import GPT, LSTM
from workloads import Workload, language, resnet, vit

from xla_amp.stablehlo import io
from xla_amp.stablehlo.program import Program


class NearlyEqual(nn.Module):
    """The difference of two products that are nearly equal."""

    width: int = 64

    @nn.compact
    def __call__(self, x: Any) -> Any:
        first, a, b, last = (nn.Dense(self.width, use_bias=False, name=name) for name in ("first", "a", "b", "last"))
        x = nn.tanh(first(x))
        return jnp.mean(last(a(x) - b(x)) ** 2)


class LargeMeans(nn.Module):
    """Batch norms of values whose mean is large beside their deviation."""

    @nn.compact
    def __call__(self, x: Any, y: Any) -> Any:
        for name in ("enter", "middle"):
            x = nn.Conv(16, (3, 3), padding="VALID", name=name)(x)
            # The variance as a difference of means is wrong by 5 % in float32.
            x = nn.relu(nn.BatchNorm(use_running_average=False, use_fast_variance=False, name=f"{name}_norm")(x))
        return cross_entropy(nn.Dense(10, name="leave")(x.mean((1, 2))), y)


class Rotary(nn.Module):
    """Attention with rotary positions up to 4096; a low dtype has only some of the angles."""

    width: int = 32

    @nn.compact
    def __call__(self, x: Any, at: Any) -> Any:
        with jax.named_scope("positions"):
            angles = at[:, None] @ (10000.0 ** (-jnp.arange(0, self.width, 2) / self.width))[None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)

        def turned(values: Any) -> Any:
            even, odd = values[..., ::2], values[..., 1::2]
            return jnp.concatenate((even * cos - odd * sin, even * sin + odd * cos), -1)[:, :, None]

        query, key, value = (nn.Dense(self.width, name=name)(x) for name in ("query", "key", "value"))
        attended = jax.nn.dot_product_attention(turned(query) * 4, turned(key), value[:, :, None])[:, :, 0]
        return jnp.mean(nn.Dense(self.width, name="out")(attended) ** 2)


class Head(nn.Module):
    """A large head whose loss is a log-sum-exp."""

    width: int = 64
    classes: int = 512

    @nn.compact
    def __call__(self, x: Any, y: Any) -> Any:
        hidden = nn.gelu(nn.Dense(self.width, name="hidden")(nn.Embed(self.classes, self.width, name="embed")(x)))
        logits = 8 * nn.Dense(self.classes, name="head")(hidden)
        total = jax.nn.logsumexp(logits, -1)
        chosen = jnp.take_along_axis(logits, y[:, None], -1)[:, 0]
        return jnp.mean(total - chosen) + 1e-4 * jnp.mean(total**2)


class Expert(nn.Module):
    """A feed-forward layer."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width = x.shape[-1]
        return nn.Dense(width, name="down")(nn.gelu(nn.Dense(2 * width, name="up")(x)))


class Mixture(nn.Module):
    """A mixture of experts: a rounded router chooses others."""

    width: int = 32
    experts: int = 4

    @nn.compact
    def __call__(self, x: Any, y: Any) -> Any:
        x = nn.Dense(self.width, name="enter")(x)
        share, chosen = jax.lax.top_k(nn.softmax(nn.Dense(self.experts, name="router")(x)), 2)
        weights = jnp.zeros((len(x), self.experts), share.dtype).at[jnp.arange(len(x))[:, None], chosen].set(share)
        mixed = sum(weights[:, i : i + 1] * Expert(name=f"experts_{i}")(x) for i in range(self.experts))
        return cross_entropy(nn.Dense(10, name="leave")(x + mixed), y)


class UNet(nn.Module):
    """A denoiser with one level, a time embedding and a skip."""

    width: int = 16

    @nn.compact
    def __call__(self, x: Any, noise: Any, at: Any) -> Any:
        width, angles = self.width, at[:, None] * jnp.arange(1.0, 9.0)
        time = nn.Dense(width, name="time")(jnp.concatenate((jnp.sin(angles), jnp.cos(angles)), -1))[:, None, None]
        mixed = jnp.cos(at)[:, None, None, None] * x + jnp.sin(at)[:, None, None, None] * noise
        high = nn.silu(nn.GroupNorm(4, name="norm")(nn.Conv(width, (3, 3), name="enter")(mixed) + time))
        deep = nn.Conv(2 * width, (3, 3), 1, name="middle")(nn.Conv(2 * width, (3, 3), 2, name="down")(high))
        up = nn.ConvTranspose(width, (4, 4), (2, 2), name="up")(nn.silu(nn.GroupNorm(4, name="middle_norm")(deep)))
        left = nn.Conv(3, (3, 3), name="leave")(jnp.concatenate((high, up), -1))
        return jnp.mean((left - noise) ** 2)


class Overflow(nn.Module):
    """A product outside of the range of float16, between products inside."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for name in ("first", "large", "small"):
            x = nn.Dense(32, name=name)(x)
        return jnp.mean(nn.Dense(32, name="last")(nn.tanh(x)) ** 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program in JAX."""

    model: nn.Module
    data: Callable[[np.random.Generator], tuple[Any, ...]]
    change: Callable[[Any], None] = lambda params: None
    """Changes the initial parameters."""
    size: str = ""
    """Where the program is not as deep as in PyTorch, for tables."""

    def make(self, batches: int) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
        """``loss(params, *batch)``, and its arguments for each batch."""
        draw = np.random.default_rng(0)
        data = [tuple(map(jnp.asarray, self.data(draw))) for _ in range(batches)]
        variables = jax.jit(self.model.init)(jax.random.key(0), *data[0])
        params = jax.tree.map(np.array, variables["params"])
        self.change(params)
        rest = {name: part for name, part in variables.items() if name != "params"}

        def loss(params: Any, *batch: Any) -> Any:
            return self.model.apply({"params": params, **rest}, *batch, mutable=list(rest))[0]

        return loss, [(params, *each) for each in data]


def _normal(*shape: int) -> Callable[[np.random.Generator], Any]:
    return lambda draw: (draw.standard_normal(shape, np.float32),)


def _labelled(classes: int, *shape: int) -> Callable[[np.random.Generator], Any]:
    return lambda draw: (draw.standard_normal(shape, np.float32), draw.integers(classes, size=shape[0], dtype=np.int32))


def _of(fields: Mapping[str, Any], change: Callable[[Any], None] = lambda params: None, size: str = "") -> Row:
    workload = Workload(name="", **fields)

    def data(draw: np.random.Generator) -> Any:
        x, y = workload.data(draw)
        return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x.astype(np.int32), y.astype(np.int32)

    return Row(model=workload.flax_model(), data=data, change=change, size=size)


def _rotary(draw: np.random.Generator) -> Any:
    return draw.standard_normal((4, 64, 32), np.float32), np.sort(draw.permutation(4096)[:64]).astype(np.float32)


def _noised(draw: np.random.Generator) -> Any:
    images = (draw.standard_normal((4, 16, 16, 3), np.float32) for _ in range(2))
    return *images, 1.5 * draw.random(4, np.float32)


def _nearly(params: Any) -> None:
    params["b"]["kernel"] = params["a"]["kernel"] * np.float32(1.01)


def _means(params: Any) -> None:
    params["enter"]["bias"][:] = 100


def _large(params: Any) -> None:
    params["large"]["kernel"] *= 3e5
    params["small"]["kernel"] *= 1e-5


def _residual(params: Any) -> None:
    for name, block in params.items():
        if name.startswith("Bottleneck"):
            block["BatchNorm_2"]["scale"][:] = 0  # otherwise the gradients of the first step are chaotic


# Less deep than in PyTorch: here XLA compiles every plan.
_SIZE: Mapping[str, Any] = {"layers": 1, "width": 64, "heads": 4}
BERT = language(2, 32, "BERT", vocabulary=256, context=32, **_SIZE)
VIT = vit(2, side=64, classes=10, **_SIZE)
RESNET = resnet(4, 32, width=8, classes=10, blocks=(1, 1))

PROGRAMS: dict[str, Row] = {
    "nearly equal": Row(model=NearlyEqual(), data=_normal(16, 64), change=_nearly),
    "batch norm": Row(model=LargeMeans(), data=_labelled(10, 8, 16, 16, 3), change=_means),
    "RoPE": Row(model=Rotary(), data=_rotary),
    "log-sum-exp": Row(model=Head(), data=lambda draw: tuple(draw.integers(512, size=(2, 64), dtype=np.int32))),
    "LSTM": _of(LSTM),
    "MoE": Row(model=Mixture(), data=_labelled(10, 64, 32)),
    "GPT-2": _of(GPT),
    "ResNet": _of(RESNET, _residual, "two stages"),
    "ViT": _of(VIT, size="one layer"),
    "BERT": _of(BERT, size="one layer"),
    "UNet": Row(model=UNet(), data=_noised),
    "overflow": Row(model=Overflow(), data=_normal(16, 32), change=_large),
}


def exported(loss: Callable[..., Any], rows: list[tuple[Any, ...]]) -> tuple[Program, list[list[np.ndarray]]]:
    """The loss and its gradients as a StableHLO module, and the arguments of each batch."""
    artifact = jax.export.export(jax.jit(jax.value_and_grad(loss)))(*rows[0]).serialize()
    return io.read(bytes(artifact)), [[np.asarray(leaf) for leaf in jax.tree.leaves(row)] for row in rows]
