"""Cost of autocast for JAX functions: tracing time of a Flax transformer, XLA's estimates for one block on targets.

    python benchmarks/jax_autocast.py [--layers 24] [--targets v6e,h100]
    python benchmarks/jax_autocast.py --parts steps [--width 512] [--rounds 15]

Tracing time is the smallest CPU time of several runs with empty caches; numbers for targets are XLA's estimates.
``steps`` measures training steps of blocks here, in a scan and alone: medians of interleaved runs, with float32 regions
computed again in the backward pass, with regions saved, and with Flax's own bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import targets
from results import interleaved, machine

from xla_amp.jax import autocast
from xla_amp.jax.analysis import float32_regions


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


class Attention(nn.Module):
    """The first half of a block."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(dtype=self.dtype)(x)
        return x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h, h)


class Gelu(nn.Module):
    """The second half of a block."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
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


def training_step(
    model: Callable[..., nn.Module], dtype: Any, wrap: Callable[..., Any], *, in_scan: bool = False
) -> Callable[..., Any]:
    """A step of gradient descent for one block, or several in a scan, whose loss is a mean square."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        block = model(8, dtype)
        if in_scan:
            x, _ = jax.lax.scan(lambda x, layer: (block.apply(layer, x).astype(x.dtype), None), x, weights)
        else:
            x = block.apply(weights, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def run(weights: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(wrap(loss))(weights, x)
        return value, jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients)

    return run


@contextlib.contextmanager
def regions_saved() -> Iterator[None]:
    """What regions compute in float32 is saved for the backward pass, as JAX does by itself."""
    with mock.patch.object(float32_regions, "candidates", return_value=float32_regions.Candidates({}, {}, {}, {})):
        yield


def steps(width: int, rounds: int) -> None:
    """Time and temporary memory of training steps of blocks on this machine."""
    x = jax.random.normal(jax.random.key(0), (8, 128, width))
    print(f"training steps, width {width}, 8 x 128 tokens, medians of {rounds} interleaved runs; {machine()}")
    # XLA merges what regions compute again with the first computation, but not across the two loops of a scan.
    for model, layers in ((Attention, 4), (Gelu, 4), (Block, 4), (Block, 1)):
        weights = model(8).init(jax.random.key(1), x[:1])
        if layers > 1:
            weights = jax.tree.map(lambda w, layers=layers: jnp.stack([w] * layers), weights)
        rows: dict[str, tuple[Any, Callable[..., Any], Any]] = {
            "float32": (None, lambda f: f, contextlib.nullcontext()),
            "Flax dtype=bfloat16": (jnp.bfloat16, lambda f: f, contextlib.nullcontext()),
            "autocast, regions computed again": (None, autocast, contextlib.nullcontext()),
            "autocast, regions saved": (None, autocast, regions_saved()),
        }
        compiled = {}
        for name, (dtype, wrap, context) in rows.items():
            jax.clear_caches()  # inner functions are traced again, with or without regions
            with context:
                compiled[name] = (
                    jax.jit(training_step(model, dtype, wrap, in_scan=layers > 1)).lower(weights, x).compile()
                )
            jax.block_until_ready(compiled[name](weights, x))

        def seconds(run: Callable[..., Any], weights: Any) -> float:
            start = time.perf_counter()
            jax.block_until_ready(run(weights, x))
            return time.perf_counter() - start

        medians = interleaved({n: functools.partial(seconds, run, weights) for n, run in compiled.items()}, rounds)
        print(f"{model.__name__}, {layers} in a scan" if layers > 1 else f"{model.__name__}, one")
        for name, median in medians.items():
            memory = compiled[name].memory_analysis().temp_size_in_bytes / 2**20
            ratio = median / medians["Flax dtype=bfloat16"]
            print(f"  {name:34} {median * 1e3:8.1f} ms {ratio:5.2f} x   {memory:7.1f} MiB of temporary memory")


def steps_of_a_block() -> tuple[dict[str, Callable[..., Any]], Any, Any]:
    """Training steps of one block by name, and their arguments: shapes of weights and data."""
    x = jax.ShapeDtypeStruct((8, 256, 512), jnp.float32)
    zeros = jnp.zeros((1, 256, 512))
    weights = jax.eval_shape(lambda key: Block(8).init(key, zeros), jax.random.key(0))
    step = functools.partial(training_step, Block)
    rows = {
        "float32": step(None, lambda f: f),
        "Flax dtype=bfloat16": step(jnp.bfloat16, lambda f: f),
        "autocast(loss)": step(None, lambda f: autocast(f, policy="tpu")),
        "autocast(step)": autocast(step(None, lambda f: f), policy="tpu"),
    }
    return rows, weights, x


def block_on(target: str, compilers: targets.Compilers) -> None:
    """XLA's estimates for a training step of one block."""
    rows, weights, x = steps_of_a_block()
    print(f"{target}, one block, width 512, 8 x 256 tokens, by XLA's cost analysis")
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
    parser.add_argument("--parts", default="tracing,targets", help="comma-separated: tracing, targets, steps")
    parser.add_argument("--width", type=int, default=512, help="of the blocks whose steps are measured")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each step")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - {"tracing", "targets", "steps"}:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; expected tracing, targets, steps")
    jax.config.update("jax_platforms", "cpu")  # targets are compiled in separate processes
    if "tracing" in parts:
        tracing(options.layers, options.repeats)
    if "steps" in parts:
        steps(options.width, options.rounds)
    if "targets" not in parts:
        return
    with targets.Compilers() as compilers:
        for target in filter(None, options.targets.split(",")):
            block_on(target, compilers)


if __name__ == "__main__":
    main()
