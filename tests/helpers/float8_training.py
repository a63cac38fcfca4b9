"""Train a small GPT on the CPU in bfloat16 and with products of 8-bit floats, and compare the losses.

    python tests/helpers/float8_training.py [--steps 500] [--seeds 3] [--width 64]

The text is this repository's documentation, character by character; all runs of a seed see the same batches.  The loss
is that of 32 batches that none has trained on; the last line compares the means over the seeds.  float32 shows how much
of a difference is chance.  The estimate of what is faster plays no part: every product with a weight is in 8 bits, but
for the head.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.common.types import Cast
from xla_amp.jax import autocast

DOCS = Path(__file__).resolve().parents[2] / "docs"
RULES: Mapping[str, Cast] = {"matmul": "fp8", "module:*.head.matmul": "low"}


@functools.cache
def text() -> np.ndarray:
    """The documentation as numbers below 128."""
    joined = "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    return np.frombuffer(joined.encode("ascii", "ignore"), np.uint8)


def parameters(key: Any, width: int, layers: int, length: int) -> dict[str, Any]:
    """Weights of a GPT with `layers` blocks."""
    keys = iter(jax.random.split(key, 3 + 4 * layers))

    def weight(*shape: int, scale: float = 0.02) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    blocks = [
        {
            "qkv": weight(width, 3 * width),
            "out": weight(width, width),
            "up": weight(width, 4 * width),
            "down": weight(4 * width, width),
            "norms": jnp.ones((2, width)),
        }
        for _ in range(layers)
    ]
    return {"embed": weight(128, width), "place": weight(length, width), "head": weight(width, 128), "blocks": blocks}


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return gain * (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def loss(weights: dict[str, Any], tokens: jax.Array, heads: int = 4) -> jax.Array:
    """Mean cross entropy of the next character; `tokens`: (batch, length + 1)."""
    x = weights["embed"][tokens[:, :-1]] + weights["place"]
    batch, length, width = x.shape
    for block in weights["blocks"]:
        q, k, v = jnp.split(_norm(x, block["norms"][0]) @ block["qkv"], 3, -1)
        q, k, v = (each.reshape(batch, length, heads, -1) for each in (q, k, v))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, width)
        x = x + attended @ block["out"]
        x = x + jax.nn.gelu(_norm(x, block["norms"][1]) @ block["up"]) @ block["down"]
    with jax.named_scope("head"):
        logits = (x @ weights["head"]).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))


def train(seed: int, rules: Mapping[str, Cast], steps: int, *, width: int, layers: int = 2, length: int = 64) -> float:
    """The loss afterwards, with AdamW, a warm-up to 2e-3 and a cosine decay, and batches of 16."""
    weights = parameters(jax.random.key(seed), width, layers, length)
    tokens, rng = text(), np.random.default_rng(seed)
    run: Callable[..., Any] = autocast(loss, policy="tpu", rules=dict(rules))

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(weights: Any, first: Any, second: Any, count: jax.Array, rate: jax.Array, batch: jax.Array) -> Any:
        gradient = jax.grad(run)(weights, batch)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradient)

        def moved(w: Any, m: Any, v: Any) -> Any:
            return w - rate * (m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-8) + 0.01 * w)

        return jax.tree.map(moved, weights, first, second), first, second

    first, second = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
    held_out = len(tokens) * 9 // 10

    def batch(start: int, stop: int) -> np.ndarray:
        starts = rng.integers(start, stop - length - 1, 16)
        return np.stack([tokens[each : each + length + 1] for each in starts]).astype(np.int32)

    for count in range(1, steps + 1):
        rate = 2e-3 * min(1.0, 10 * count / steps) * (0.55 + 0.45 * np.cos(np.pi * count / steps))
        weights, first, second = step(weights, first, second, jnp.float32(count), jnp.float32(rate), batch(0, held_out))
    evaluate = jax.jit(run)
    return float(np.mean([float(evaluate(weights, batch(held_out, len(tokens)))) for _ in range(32)]))


def shown(losses: Any) -> str:
    """Losses in bfloat16, fp8 and float32, and the differences from the first."""
    low, small, wide = losses
    return (
        f"bfloat16 {low:.4f}, fp8 {small:.4f} ({100 * (small / low - 1):+.2f} %), "
        f"float32 {wide:.4f} ({100 * (wide / low - 1):+.2f} %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    losses = []
    for seed in range(options.seeds):
        kinds: tuple[Mapping[str, Cast], ...] = ({}, RULES, {"*": "fp32"})
        losses.append([train(seed, rules, options.steps, width=options.width) for rules in kinds])
        print(f"seed {seed}: {shown(losses[-1])}", flush=True)
    print(f"mean of {options.seeds}: {shown(np.mean(losses, 0))}")


if __name__ == "__main__":
    main()
