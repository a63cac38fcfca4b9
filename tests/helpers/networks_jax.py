"""Models of Flax (linen and nnx), Equinox and Haiku as their users write them, in float32."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx


class Block(nn.Module):
    """A transformer block; `dtype` is Flax's own switch, for the hand-written counterpart."""

    heads: int = 4
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h, h)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(h))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(h)


class Transformer(nn.Module):
    layers: int
    width: int = 64
    words: int = 100

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.words, self.width)(tokens)
        for _ in range(self.layers):
            x = Block()(x)
        return nn.Dense(self.words)(nn.LayerNorm()(x))


class NnxCnn(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.second = nnx.Conv(4, 8, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Linear(8 * 4 * 4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        x = nnx.relu(self.second(x))
        return self.head(x.reshape(x.shape[0], -1))


class EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP

    def __init__(self, width, heads, key):
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=one)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, activation=jax.nn.gelu, key=two)

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class EquinoxTransformer(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[EquinoxBlock]
    head: eqx.nn.Linear

    def __init__(self, layers, width, words, key):
        keys = jax.random.split(key, layers + 2)
        self.embedding = eqx.nn.Embedding(words, width, key=keys[0])
        self.blocks = [EquinoxBlock(width, 4, key) for key in keys[2:]]
        self.head = eqx.nn.Linear(width, words, key=keys[1])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def haiku_network():
    def forward(x):
        x = hk.Conv2D(4, 3)(x)
        x = jax.nn.relu(hk.LayerNorm((1, 2, 3), create_scale=True, create_offset=True)(x))
        return hk.Linear(3)(hk.Flatten()(x))

    return hk.transform(forward)


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))
