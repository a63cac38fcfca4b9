"""Cost of autocast for JAX functions: tracing time of a Flax transformer, XLA's estimates for one block on targets.

    python benchmarks/jax_autocast.py [--layers 24] [--targets v6e,h100]

Tracing time is the smallest CPU time of several runs with empty caches; numbers for targets are XLA's estimates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from xla_amp.jax import autocast
from xla_amp.stablehlo.tools import targets


class Block(nn.Module):
    """A transformer block; `dtype` is Flax's argument for mixed precision."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h, h)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(h))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(h)


class Transformer(nn.Module):
    """Tokens to logits."""

    layers: int
    width: int = 64
    words: int = 100

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.words, self.width)(tokens)
        for _ in range(self.layers):
            x = Block(4)(x)
        return nn.Dense(self.words)(nn.LayerNorm()(x))


def seconds_to_trace(function: Callable[..., Any], *args: Any, repeats: int) -> float:
    """The smallest CPU time of `repeats` traces, each with empty JAX caches."""
    times = []
    for _ in range(repeats):
        jax.clear_caches()
        start = time.process_time()
        jax.jit(function).trace(*args)
        times.append(time.process_time() - start)
    return min(times)


def tracing(layers: int, repeats: int) -> None:
    """Tracing time, loss and gradients of a transformer with and without autocast."""
    model = Transformer(layers)
    tokens = jax.random.randint(jax.random.key(0), (2, 32), 0, 100)
    weights = model.init(jax.random.key(1), tokens)

    def loss(weights: Any) -> jax.Array:
        logits = jax.nn.log_softmax(model.apply(weights, tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    plain = jax.value_and_grad(loss)
    base = seconds_to_trace(plain, weights, repeats=repeats)
    print(f"{layers} layers, value_and_grad of the loss: traced in {base:.2f} s without autocast")
    rows: dict[str, Callable[..., Any]] = {
        "value_and_grad(autocast(loss))": jax.value_and_grad(autocast(loss)),
        "the same, driver='trace'": jax.value_and_grad(autocast(loss, driver="trace")),
        "autocast(value_and_grad(loss))": autocast(plain),
    }
    for name, function in rows.items():
        took = seconds_to_trace(function, weights, repeats=repeats)
        print(f"  {name:32} {took:6.2f} s   {took / base:5.2f} x")
    value, gradients = jax.jit(plain)(weights)
    low_value, low_gradients = jax.jit(rows["value_and_grad(autocast(loss))"])(weights)
    one, other = (
        jnp.concatenate([array.ravel() for array in jax.tree.leaves(tree)]) for tree in (gradients, low_gradients)
    )
    cosine = jnp.dot(one, other) / jnp.linalg.norm(one) / jnp.linalg.norm(other)
    print(f"  loss relative difference {abs(value - low_value) / value:.2e}, cosine of gradients {cosine:.5f}")


def block_on(target: str, compilers: targets.Compilers) -> None:
    """XLA's estimates for a training step of one block."""
    x = jax.ShapeDtypeStruct((8, 256, 512), jnp.float32)
    zeros = jnp.zeros((1, 256, 512))
    weights = jax.eval_shape(lambda key: Block(8).init(key, zeros), jax.random.key(0))

    def step(dtype: Any, wrap: Callable[..., Any]) -> Callable[..., Any]:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(Block(8, dtype).apply(weights, x).astype(jnp.float32) ** 2)

        def run(weights: Any, x: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(wrap(loss))(weights, x)
            return value, jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients)

        return run

    rows = {
        "float32": step(None, lambda f: f),
        "Flax dtype=bfloat16": step(jnp.bfloat16, lambda f: f),
        "autocast(loss)": step(None, lambda f: autocast(f, policy="tpu")),
        "autocast(step)": autocast(step(None, lambda f: f), policy="tpu"),
    }
    print(f"{targets.specification(target)['title']}, one block, width 512, 8 x 256 tokens, by XLA's cost analysis")
    base = None
    for name, function in rows.items():
        found = compilers.compile(targets.lower(function, weights, x, target=target), target)
        moved = found.bytes_accessed or 0
        base = base or (found.seconds, moved)
        time_ = f"{found.seconds * 1e6:7.1f} us {found.seconds / base[0]:5.2f} x" if found.seconds and base[0] else ""
        print(
            f"  {name:20} {time_:20} {moved / 2**20:7.1f} MiB {moved / base[1]:5.2f} x   {dict(found.contractions())}"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--targets", default="v6e,h100", help="comma-separated; empty for none")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # targets are compiled in separate processes
    tracing(options.layers, options.repeats)
    with targets.Compilers() as compilers:
        for target in filter(None, options.targets.split(",")):
            block_on(target, compilers)


if __name__ == "__main__":
    main()
