"""Train a byte-level language model in Flax, in float32, bfloat16 or float16, without an edit of the model.

    pip install '.[examples]' flax optax
    python examples/flax_lm.py --precision bf16
    python examples/flax_lm.py --precision fp16 --steps 1000 --log-dir logs

The model below names no dtype.  `xla_amp.jax.autocast` around the loss chooses one for each operation, `LossScale`
scales the loss for float16, and `skip_nonfinite` makes any optax optimizer leave out the steps that overflow.  The text
is the documentation strings of Python's standard library unless `--text` names a file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from absl import app, flags
from flax import linen as nn
from tqdm import tqdm

from xla_amp.jax import LossScale, autocast, skip_nonfinite, value_and_grad

PRECISION = flags.DEFINE_enum("precision", "bf16", ["fp32", "bf16", "fp16"], "what the forward pass computes in")
POLICY = flags.DEFINE_string("policy", None, "cast rules: tpu, gpu, ... or a TOML file; default: those of the backend")
TEXT = flags.DEFINE_string("text", None, "text to learn; default: the documentation strings of the standard library")
STEPS = flags.DEFINE_integer("steps", 300, "training steps", lower_bound=1)
BATCH = flags.DEFINE_integer("batch-size", 16, "sequences per step", lower_bound=1)
CONTEXT = flags.DEFINE_integer("context", 128, "bytes per sequence", lower_bound=8)
LAYERS = flags.DEFINE_integer("layers", 2, "transformer blocks", lower_bound=1)
WIDTH = flags.DEFINE_integer("width", 128, "channels; a multiple of 32, the size of a head", lower_bound=32)
LR = flags.DEFINE_float("lr", 1e-3, "highest learning rate")
LOG_STEPS = flags.DEFINE_integer("log-steps", 20, "steps between two readings of the loss", lower_bound=1)
LOG_DIR = flags.DEFINE_string("log-dir", None, "write losses, learning rates and loss scales here (TensorBoard, CSV)")
SEED = flags.DEFINE_integer("seed", 0, "seed of weights and batches")
JSON = flags.DEFINE_bool("json", False, "print the results as one JSON object on the last line")

LOW = {"fp32": None, "bf16": jnp.bfloat16, "fp16": jnp.float16}
HEAD = 32
HELD_OUT = 0.1  # fraction of the text, at its end, that is not trained on
HELD_OUT_BATCHES = 4


class Block(nn.Module):
    """Attention and a perceptron, each after a norm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float32 [batch, length, width] to the same shape."""
        mask = nn.make_causal_mask(x[:, :, 0])
        width = x.shape[-1]
        x += nn.MultiHeadDotProductAttention(num_heads=width // HEAD)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))


class Model(nn.Module):
    """Bytes int32 [batch, length] -> logits of the next byte [batch, length, 256]."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(256, WIDTH.value)
        x = embed(tokens) + nn.Embed(CONTEXT.value, WIDTH.value)(jnp.arange(tokens.shape[1]))
        for _ in range(LAYERS.value):
            x = Block()(x)
        return embed.attend(nn.LayerNorm()(x))


def batches(text: np.ndarray[Any, Any], seed: int) -> Iterator[Any]:
    """Endless random pieces of the text, int32 [batch, context + 1]."""
    random = np.random.default_rng(seed)
    window = np.arange(CONTEXT.value + 1)
    while True:
        yield text[random.integers(len(text) - CONTEXT.value - 1, size=(BATCH.value, 1)) + window].astype(np.int32)


def train(text: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Trains; returns the results."""
    split = int(len(text) * (1 - HELD_OUT))
    model = Model()

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, tokens[:, :-1])
        mean: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return mean

    low = LOW[PRECISION.value]
    amp = autocast(loss, policy=POLICY.value, dtype=low, enabled=low is not None)
    schedule = optax.warmup_cosine_decay_schedule(0.0, LR.value, min(50, STEPS.value // 4), STEPS.value)
    optimizer = skip_nonfinite(optax.adamw(schedule))

    @jax.jit
    def step(params: Any, state: Any, scale: LossScale, tokens: jax.Array) -> Any:
        value, gradients, finite, scale = value_and_grad(amp)(scale, params, tokens)
        updates, state = optimizer.update(gradients, state, params, finite=finite)
        return optax.apply_updates(params, updates), state, scale, value

    data = batches(text[:split], SEED.value)
    params = model.init(jax.random.key(SEED.value), next(data)[:, :-1])
    state = optimizer.init(params)
    scale = LossScale.dynamic() if PRECISION.value == "fp16" else LossScale.static(1.0)
    log = common.Log(LOG_DIR.value)
    began = time.perf_counter()
    first: float | None = None
    bar = tqdm(range(1, STEPS.value + 1), unit="step")
    for number in bar:
        params, state, scale, value = step(params, state, scale, next(data))
        if number % LOG_STEPS.value == 0 or number == STEPS.value:  # the only place where Python waits
            last = float(value)
            first = last if first is None else first
            log.add(number, {"loss": last, "lr": schedule(number - 1), "loss_scale": scale.value}, bar)
    seconds = time.perf_counter() - began
    log.close()
    held_out = batches(text[split:], SEED.value)
    evaluate = jax.jit(amp)
    losses = [float(evaluate(params, next(held_out))) for _ in range(HELD_OUT_BATCHES)]
    return {
        "backend": jax.default_backend(),
        "first_loss": first,
        "last_loss": last,
        "loss_scale": float(scale.value),
        "skipped": int(scale.skipped),
        "held_out_loss": float(np.mean(losses)),
        "low_products": sum(line.count for line in amp.report(params, jnp.asarray(next(held_out))).low),
        "seconds": seconds,
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    if WIDTH.value % HEAD:
        raise app.UsageError(f"--width={WIDTH.value} must be a multiple of {HEAD}, the size of a head")
    text = np.frombuffer(common.load_text(TEXT.value), np.uint8)
    least = 10 * BATCH.value * CONTEXT.value
    if len(text) < least:
        raise app.UsageError(f"the text has {len(text)} bytes; expected at least {least} for this batch and context")
    results = {"precision": PRECISION.value, **train(text)}
    common.show(f"Flax on {len(text):,} bytes, {STEPS.value} steps", results, JSON.value)


if __name__ == "__main__":
    common.run(main)
