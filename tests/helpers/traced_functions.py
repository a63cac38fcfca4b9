"""Functions of (weights, x) that autocast must treat: one row for each construct of JAX, and models.

Each row is a function of a pytree of float32 weights and one float32 input to a float array of which every gradient
exists, written with no thought of mixed precision.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, DEPTH = 6, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    function: Callable[[Any, Any], Any]
    weights: Callable[[np.random.RandomState], Any]
    x: Callable[[np.random.RandomState], Any]
    tolerance: float = 1.5e-2
    """Of the norm of the difference to float64, relative to the norm."""
    exact: Callable[[Any, Any], Any] | None = None
    """The same function for float64, where the row's own cannot run in it."""
    wide: str = ""
    """Why some contractions are float32."""
    vmapped: bool = True


def array(random: np.random.RandomState, *shape: int, scale: float | None = None) -> np.ndarray[Any, Any]:
    scale = 1 / np.sqrt(shape[0]) if scale is None else scale
    return (random.randn(*shape) * scale).astype(np.float32)


def square(random: np.random.RandomState) -> Any:
    return {"w": array(random, DEPTH, DEPTH)}


def two(random: np.random.RandomState) -> Any:
    return {"w": array(random, DEPTH, DEPTH), "v": array(random, DEPTH, DEPTH), "b": array(random, DEPTH, scale=0.1)}


def batch(random: np.random.RandomState) -> Any:
    return array(random, ROWS, DEPTH, scale=1)


TABLE: list[Row] = []


def row(weights: Any = square, x: Any = batch, **settings: Any) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        settings.setdefault("name", function.__name__)
        TABLE.append(Row(function=function, weights=weights, x=x, **settings))
        return function

    return add


@row(two)
def softmax_mixture(p, x):
    return jax.nn.softmax(x @ p["w"]) @ p["v"]


@row(two, x=lambda random: array(random, 2, 6, DEPTH, scale=1))
def masked_attention(p, x):
    q, k, v = ((x @ p[name]).reshape(2, 6, 1, DEPTH) for name in ("w", "v", "w"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@row(two)
def nested_jit(p, x):
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    return jax.jit(lambda p, x: layer(p["v"], layer(p["w"], layer(p["w"], x))))(p, x)


@row(lambda random: {"w": np.stack([array(random, DEPTH, DEPTH) for _ in range(3)])})
def scan_over_layers(p, x):
    last, sums = lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum(-1)), x, p["w"])
    return last + sums.sum(0)[:, None]


@row()
def fori(p, x):
    return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ p["w"]), x)


@row()
def associative(p, x):
    return x @ lax.associative_scan(jnp.matmul, jnp.stack([p["w"]] * 3))[-1]


@row(two)
def branch(p, x):
    return lax.cond(x[0, 0] > -9, lambda x: jnp.tanh(x @ p["w"]), lambda x: x * 2, x) @ p["v"]


@row(two)
def remat_with_policy(p, x):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]), policy=policy)(p, x)


@row()
def scan_of_remat(p, x):
    layer = jax.checkpoint(lambda c, w: jnp.tanh(c @ w))
    return lax.scan(lambda c, _: (layer(c, p["w"]), None), x, None, length=2)[0]


@jax.custom_jvp
def tanh_layer(w, x):
    return jnp.tanh(x @ w)


@tanh_layer.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    y = tanh_layer(w, x)
    return y, (1 - y * y) * (dx @ w + x @ dw)


@row()
def own_jvp(p, x):
    return tanh_layer(p["w"], x)


@jax.custom_vjp
def scaled_layer(w, x):
    return jnp.tanh(x @ w)


def _forward(w, x):
    y = scaled_layer(w, x)
    return y, (w, x, y)


def _backward(kept, dy):
    w, x, y = kept
    dy = dy * (1 - y * y)
    return x.T @ dy, dy @ w.T


scaled_layer.defvjp(_forward, _backward)


@row()
def own_vjp(p, x):
    return scaled_layer(p["w"], x)


@functools.cache
def mesh():
    return jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


@row()
def shard_map(p, x):
    spec = jax.sharding.PartitionSpec
    part = jax.shard_map(
        lambda w, x: lax.psum(jnp.tanh(x @ w), "d"), mesh=mesh(), in_specs=(spec(), spec()), out_specs=spec()
    )
    return part(p["w"], x)


@row(vmapped=False)
def pmap(p, x):
    return jax.pmap(lambda w, x: jnp.tanh(x @ w), in_axes=(None, 0))(p["w"], x[None])[0]


def image(random):
    return array(random, 2, 8, 8, 4, scale=1)


LAYOUT = ("NHWC", "HWIO", "NHWC")


@row(lambda random: {"w": array(random, 3, 3, 2, 6, scale=0.2)}, image)
def grouped_strided_convolution(p, x):
    return lax.conv_general_dilated(
        x, p["w"], (2, 2), "SAME", rhs_dilation=(2, 2), dimension_numbers=LAYOUT, feature_group_count=2
    )


@row(lambda random: {"w": array(random, 3, 3, 4, 6, scale=0.2)}, image)
def transposed_convolution(p, x):
    return lax.conv_transpose(x, p["w"], (2, 2), "SAME", dimension_numbers=LAYOUT)


def cell(random):
    return {"w": array(random, 2 * DEPTH, 4 * DEPTH), "b": array(random, 4 * DEPTH, scale=0.1)}


@row(cell, lambda random: array(random, 5, ROWS, DEPTH, scale=1), tolerance=2e-2)
def lstm(p, x):
    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ p["w"] + p["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros(x.shape[1:], x.dtype)
    return lax.scan(step, (zero, zero), x)[1]


@row(lambda random: {"e": array(random, 10, DEPTH, scale=1), **square(random)})
def embedding(p, x):
    return p["e"][jnp.array([1, 3, 3, 7, 0, 9])] @ p["w"] + x.at[0].add(x[1])


@row()
def fourier(p, x):
    return jnp.abs(jnp.fft.rfft(x @ p["w"]))


@row(two)
def ordered(p, x):
    values, _ = lax.top_k(x @ p["w"], DEPTH)
    return values @ p["v"]


@row(wide="solving a linear system is one operation to the rules, in float32 with its derivative")
def linear_system(p, x):
    return jnp.linalg.solve(p["w"] + 4 * jnp.eye(DEPTH), (x @ p["w"]).T)


@row(tolerance=2.5e-2)
def gradient_penalty(p, x):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["w"]) ** 2))(x)


@row(two)
def train_step_inside(p, x):
    gradients = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]) ** 2))(p)
    p = jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients)
    return jnp.tanh(x @ p["w"]) @ p["v"]


@row(two)
def forward_mode_inside(p, x):
    return jax.jvp(lambda x: jnp.tanh(x @ p["w"]), (x,), (jnp.tanh(x @ p["v"]),))[1]


@row(
    lambda random: {"w": array(random, 3, DEPTH, DEPTH, scale=0.4)},
    lambda random: array(random, 6, DEPTH, scale=1),
    vmapped=False,
)
def ragged(p, x):
    return lax.ragged_dot(x, p["w"], jnp.array([2, 1, 3], jnp.int32))


def _plain_flash(p, x):
    q, k, v = ((x @ p[name]).reshape(1, 32, 1, 16) for name in ("q", "k", "v"))
    return jax.nn.dot_product_attention(q, k, v, scale=0.25)


@row(
    lambda random: {name: array(random, 16, 16) for name in ("q", "k", "v")},
    lambda random: array(random, 32, 16, scale=1),
    exact=_plain_flash,
    wide="the products of the kernel, which was written for float32",
    vmapped=False,
)
def flash_attention(p, x):
    from jax.experimental.pallas.ops.gpu import attention

    sizes = attention.BlockSizes(block_q=16, block_k=16, block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16)
    q, k, v = ((x @ p[name]).reshape(1, 32, 1, 16) for name in ("q", "k", "v"))
    return attention.mha(q, k, v, None, sm_scale=0.25, block_sizes=sizes, interpret=True)
