"""The models of `models.py` in Flax, with mixed precision by Flax's `dtype` argument, and a training step of them.

Parameters are float32, activations `dtype`; logits are float32 in the loss.  Images are NHWC, as in Flax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from models import GPTConfig, LSTMConfig, ViTConfig
from workloads import Workload


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy over the last axis, averaged, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


class Bottleneck(nn.Module):
    """The residual block of ResNet-50."""

    width: int
    stride: int
    project: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def conv(x: jax.Array, width: int, kernel: int, stride: int = 1) -> jax.Array:
            pad = kernel // 2
            y = nn.Conv(width, (kernel, kernel), stride, [(pad, pad)] * 2, use_bias=False, dtype=self.dtype)(x)
            return nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(y)

        y = nn.relu(conv(x, self.width, 1))
        y = nn.relu(conv(y, self.width, 3, self.stride))
        y = conv(y, 4 * self.width, 1)
        return nn.relu(y + (conv(x, 4 * self.width, 1, self.stride) if self.project else x))


class ResNet50(nn.Module):
    """Images ``[batch, height, width, 3]`` and labels to the loss."""

    width: int = 64
    classes: int = 1000
    blocks: Sequence[int] = (3, 4, 6, 3)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (7, 7), 2, [(3, 3)] * 2, use_bias=False, dtype=self.dtype)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), [(1, 1)] * 2)
        for stage, count in enumerate(self.blocks):
            for block in range(count):
                x = Bottleneck(self.width << stage, 2 if stage and not block else 1, not block, self.dtype)(x)
        return cross_entropy(nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2))), labels)


class Block(nn.Module):
    """A transformer block; `causal` and `before` (norm first) as in the model."""

    heads: int
    dtype: Any
    causal: bool = False
    before: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape

        def attention(x: jax.Array) -> jax.Array:
            qkv = nn.Dense(3 * width, dtype=self.dtype)(x).reshape(batch, time, 3, self.heads, width // self.heads)
            mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=self.causal)
            return nn.Dense(width, dtype=self.dtype)(mixed.reshape(batch, time, width))

        def perceptron(x: jax.Array) -> jax.Array:
            return nn.Dense(width, dtype=self.dtype)(nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(x)))

        for part in (attention, perceptron):
            norm = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)
            x = x + part(norm(x)) if self.before else norm(x + part(x))
        return x


class _TokenModel(nn.Module):
    """A transformer over tokens with tied embeddings; `enter` and `leave` are called before and after its blocks."""

    config: GPTConfig
    dtype: Any = jnp.float32
    causal = True

    def norm(self, x: jax.Array) -> jax.Array:
        return nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)(x)

    def enter(self, x: jax.Array) -> jax.Array:
        return x

    def leave(self, x: jax.Array) -> jax.Array:
        return self.norm(x)

    @nn.compact
    def __call__(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        config = self.config
        embed = nn.Embed(config.vocabulary, config.width, dtype=self.dtype)
        x = embed(tokens) + nn.Embed(config.context, config.width, dtype=self.dtype)(jnp.arange(tokens.shape[1]))
        x = self.enter(x)
        for _ in range(config.layers):
            x = Block(config.heads, self.dtype, causal=self.causal, before=self.causal)(x)
        return cross_entropy(embed.attend(self.leave(x)), targets)


class GPT(_TokenModel):
    """Tokens and targets ``[batch, time]`` to the loss."""


class BERT(_TokenModel):
    """Masked tokens and targets ``[batch, time]`` to the loss over all positions."""

    causal = False

    def enter(self, x: jax.Array) -> jax.Array:
        return self.norm(x)

    def leave(self, x: jax.Array) -> jax.Array:
        return self.norm(nn.gelu(nn.Dense(self.config.width, dtype=self.dtype)(x)))


class ViT(nn.Module):
    """Images ``[batch, side, side, 3]`` and labels to the loss."""

    config: ViTConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        config, patch = self.config, self.config.patch
        x = nn.Conv(config.width, (patch, patch), patch, "VALID", dtype=self.dtype)(images)
        x = x.reshape(len(x), -1, config.width)
        first = self.param("first", nn.initializers.zeros, (1, 1, config.width)).astype(self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(first, (len(x), 1, config.width)), x], 1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], config.width)).astype(self.dtype)
        for _ in range(config.layers):
            x = Block(config.heads, self.dtype)(x)
        x = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)(x)[:, 0]
        return cross_entropy(nn.Dense(config.classes, dtype=self.dtype)(x), labels)


class LSTM(nn.Module):
    """Tokens and targets ``[batch, time]`` to the loss."""

    config: LSTMConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        config = self.config
        x = nn.Embed(config.vocabulary, config.width, dtype=self.dtype)(tokens)
        for _ in range(config.layers):
            x = nn.RNN(nn.OptimizedLSTMCell(config.width, dtype=self.dtype))(x)
        return cross_entropy(nn.Dense(config.vocabulary, dtype=self.dtype)(x), targets)


def optimizer_of(workload: Workload) -> optax.GradientTransformation:
    """The optimizer of the PyTorch side, in optax."""
    return optax.sgd(1e-3, momentum=0.9) if workload.optimizer == "sgd" else optax.adamw(1e-4, weight_decay=1e-2)


def initial(workload: Workload, model: Any, abstract: bool = False) -> tuple[Any, Any, Any]:
    """Parameters, other collections (batch statistics) and optimizer state; only their shapes with `abstract`."""

    def make() -> tuple[Any, Any, Any]:
        variables = model.init(jax.random.key(0), *(jnp.asarray(x[:1]) for x in workload.flax_batch()))
        rest = {name: part for name, part in variables.items() if name != "params"}
        return variables["params"], rest, optimizer_of(workload).init(variables["params"])

    return jax.eval_shape(make) if abstract else jax.jit(make)()


def loss_of(model: Any, names: list[str]) -> Callable[..., Any]:
    """``loss(params, rest, x, y)`` to the loss and the new other collections."""

    def loss(params: Any, rest: Any, x: Any, y: Any) -> Any:
        return model.apply({"params": params, **rest}, x, y, mutable=names)

    return loss


def step_of(workload: Workload, dtype: Any, abstract: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Jitted ``step(params, rest, state, x, y) -> (params, rest, state, loss)``, and its initial state."""
    model, optimizer = workload.flax_model(dtype), optimizer_of(workload)
    start = initial(workload, model, abstract)
    loss = loss_of(model, list(start[1]))

    def step(params: Any, rest: Any, state: Any, x: Any, y: Any) -> Any:
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    return jax.jit(step, donate_argnums=(0, 1, 2)), start
