"""Trains a small decoder on 8 virtual CPU devices, in float32 and under autocast, and prints what it found as JSON.

The decoder has rotary positions, a mixture of experts with a float32 router, biases, and rematerialized layers in a
scan.  Its weights are sharded over the devices (FSDP): each layer gathers its own inside `shard_map`.
"""

from __future__ import annotations

import collections
import json
import os
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxlib.mlir import ir

from xla_amp.jax import autocast

LAYERS, WIDTH, HEADS, EXPERTS, WORDS, BATCH, LENGTH = 3, 32, 4, 4, 64, 16, 16
SHARDED, EVERYWHERE = PartitionSpec("d"), PartitionSpec()
MESH = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def weights():
    random = np.random.RandomState(0)

    def array(*shape, inputs):
        return jnp.asarray(random.randn(*shape) / np.sqrt(inputs), jnp.float32)

    head = WIDTH // HEADS
    layers = {
        "scale": jnp.ones((LAYERS, 2, WIDTH)),
        "qkv": array(LAYERS, WIDTH, 3, HEADS, head, inputs=WIDTH),
        "qkv_bias": jnp.zeros((LAYERS, 3, HEADS, head)),
        "out": array(LAYERS, WIDTH, WIDTH, inputs=WIDTH),
        "out_bias": jnp.zeros((LAYERS, WIDTH)),
        "router": array(LAYERS, WIDTH, EXPERTS, inputs=WIDTH),
        "up": array(LAYERS, WIDTH, EXPERTS, 2 * WIDTH, inputs=WIDTH),
        "down": array(LAYERS, 2 * WIDTH, EXPERTS, WIDTH, inputs=2 * WIDTH),
    }
    return {"words": array(WORDS, WIDTH, inputs=1), "head": array(WIDTH, WORDS, inputs=WIDTH), "layers": layers}


GATHERED = ("qkv", "out", "up", "down")


def specs(tree):
    layers = {name: PartitionSpec(None, "d") if name in GATHERED else EVERYWHERE for name in tree["layers"]}
    return {"words": EVERYWHERE, "head": SHARDED, "layers": layers}


def decoder(dtype):
    """The loss on one device; `dtype` is that of the hand-written casts, None for none."""

    def cast(x):
        return x if dtype is None else x.astype(dtype)

    def gather(w):
        return lax.all_gather(cast(w), "d", axis=0, tiled=True)

    def norm(x, scale):
        wide = x.astype(jnp.float32)
        return cast(wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6) * scale)

    def rotate(x):
        half = x.shape[-1] // 2
        frequencies = 1 / 100 ** (jnp.arange(half) / half)
        angle = jnp.einsum("i,j->ij", jnp.arange(float(x.shape[1])), frequencies, precision="highest")[:, None]
        one, other = x[..., :half], x[..., half:]
        sine, cosine = cast(jnp.sin(angle)), cast(jnp.cos(angle))
        return jnp.concatenate([one * cosine - other * sine, one * sine + other * cosine], -1)

    @jax.checkpoint
    def layer(x, w):
        h = norm(x, w["scale"][0])
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dnhk->btnhk", h, gather(w["qkv"])) + cast(w["qkv_bias"]), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)) / np.sqrt(WIDTH // HEADS)
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        attention = cast(jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), -1e9)))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", attention, v).reshape(x.shape)
        x = x + (mixed @ gather(w["out"]) + cast(w["out_bias"]))
        h = norm(x, w["scale"][1])
        logits = jnp.matmul(h.astype(jnp.float32), w["router"], precision="highest")
        gates = cast(jax.nn.softmax(logits) * (logits >= lax.top_k(logits, 2)[0][..., -1:]))
        hidden = jax.nn.silu(jnp.einsum("btd,def->btef", h, gather(w["up"]))) * gates[..., None]
        return x + jnp.einsum("btef,fed->btd", hidden, gather(w["down"])), None

    def loss(w, words):
        x = cast(w["words"])[words[:, :-1]]
        x, _ = lax.scan(layer, x, w["layers"])
        logits = jax.nn.log_softmax((x @ gather(w["head"])).astype(jnp.float32))
        return lax.pmean(-jnp.mean(jnp.take_along_axis(logits, words[:, 1:, None], -1)), "d")

    return loss


def sharded(loss, tree):
    return jax.shard_map(loss, mesh=MESH, in_specs=(specs(tree), SHARDED), out_specs=EVERYWHERE)


def data(step):
    start = jax.random.randint(jax.random.key(step), (BATCH, 1), 0, WORDS)
    return (start + 3 * jnp.arange(LENGTH + 1)) % WORDS


def train(gradient, w, steps):
    @jax.jit
    def step(w, words):
        value, gradients = gradient(w, words)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients), value

    losses = []
    for number in range(steps):
        w, value = step(w, data(number))
        losses.append(float(value))
    return losses


def collectives(gradient, w):
    """Kind and dtype of each collective of an array whose result is read: XLA drops the others."""
    found = collections.Counter()

    def look(operation):
        operation = operation.operation
        if operation.name in ("stablehlo.all_gather", "stablehlo.reduce_scatter", "stablehlo.all_reduce"):
            result = ir.RankedTensorType(operation.results[0].type)
            if result.rank and list(operation.results[0].uses):
                found[f"{operation.name.removeprefix('stablehlo.')} {result.element_type}"] += 1
        return ir.WalkResult.ADVANCE

    jax.jit(gradient).lower(w, data(0)).compiler_ir("stablehlo").operation.walk(look)
    return found


def saved_bytes(loss, w):
    """Bytes that the forward pass saves for the backward pass, without the weights themselves."""
    traced = jax.make_jaxpr(lambda w: jax.vjp(lambda w: loss(w, data(0)), w))(w).jaxpr
    variables = {var for var in traced.outvars[1:] if not hasattr(var, "val")} - set(traced.invars)
    return sum(var.aval.size * var.aval.dtype.itemsize for var in variables)


def main(steps):
    w = weights()
    plain, by_hand = sharded(decoder(None), w), sharded(decoder(jnp.bfloat16), w)
    inside = jax.value_and_grad(autocast(plain, carry="low"))
    outside = autocast(jax.value_and_grad(plain), carry="low")
    report = {
        "collectives": {"inside": collectives(inside, w), "outside": collectives(outside, w)},
        "saved": {
            name: saved_bytes(loss, w)
            for name, loss in {
                "float32": plain,
                "by hand": by_hand,
                "autocast": autocast(plain, carry="low"),
            }.items()
        },
        "losses": {
            name: train(gradient, w, steps)
            for name, gradient in {
                "float32": jax.value_and_grad(plain),
                "inside": inside,
                "outside": outside,
            }.items()
        },
        "gradient dtypes": sorted({str(g.dtype) for g in jax.tree.leaves(jax.eval_shape(inside, w, data(0))[1])}),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]))
