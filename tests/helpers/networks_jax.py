"""Models of Flax's nnx, Equinox and Haiku as their users write them, in float32.  One of linen: jax_autocast.py."""

from __future__ import annotations

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx


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
