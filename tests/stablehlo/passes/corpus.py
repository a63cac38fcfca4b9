"""Programs that JAX users write, as functions and arguments: a corpus for the StableHLO pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

WIDTH, HEADS = 16, 2


class Case(NamedTuple):
    """A function with arguments, and the accepted error of its conversion."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    tolerance: float = 0.02
    """Largest error of an output, as a norm relative to the output's: some bfloat16 roundings (2**-9) deep."""
    contractions: int = 1
    """Smallest expected number."""
    asked: int = 0
    """Contractions whose precision the program asks for: they stay in float32."""


def floats(*shape: int, scale: float = 1.0) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(sum(shape) + 7 * len(shape))
    return (scale * generator.standard_normal(shape)).astype(np.float32)


# Networks.


def mlp(parameters: Any, x: Any) -> Any:
    for weight, bias in parameters[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = parameters[-1]
    return x @ weight + bias


def mlp_parameters() -> Any:
    sizes = [(16, 32), (32, 32), (32, 8)]
    return [(floats(*size, scale=0.2), floats(size[1], scale=0.1)) for size in sizes]


def mlp_loss(parameters: Any, x: Any, y: Any) -> Any:
    return jnp.mean((mlp(parameters, x) - y) ** 2)


def layer_norm(x: Any, gain: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * gain + bias


def block(p: Any, x: Any, heads: int = HEADS) -> Any:
    """A transformer block: causal attention and a GELU network, each behind a layer norm."""
    batch, length, width = x.shape
    h = layer_norm(x, p["gain1"], p["shift1"])
    qkv = (h @ p["qkv"] + p["qkv_bias"]).reshape(batch, length, 3, heads, width // heads)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(width // heads)
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, v).transpose(0, 2, 1, 3).reshape(batch, length, width)
    x = x + mixed @ p["out"] + p["out_bias"]
    h = layer_norm(x, p["gain2"], p["shift2"])
    return x + jax.nn.gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def block_parameters(width: int = WIDTH) -> Any:
    scale = width**-0.5
    return {
        "gain1": 1 + floats(width, scale=0.1),
        "shift1": floats(width, scale=0.1),
        "qkv": floats(width, 3 * width, scale=scale),
        "qkv_bias": floats(3 * width, scale=0.1),
        "out": floats(width, width, scale=scale),
        "out_bias": floats(width, scale=0.1),
        "gain2": 1 + floats(width, scale=0.1),
        "shift2": floats(width, scale=0.1),
        "up": floats(width, 4 * width, scale=scale),
        "up_bias": floats(4 * width, scale=0.1),
        "down": floats(4 * width, width, scale=scale / 2),
        "down_bias": floats(width, scale=0.1),
    }


def block_loss(p: Any, x: Any, y: Any) -> Any:
    return jnp.mean((block(p, x) - y) ** 2)


def convolved(kernel: Any, x: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def residual_network(p: Any, x: Any) -> Any:
    h = convolved(p["first"], x)
    h = (h - h.mean((0, 1, 2))) * lax.rsqrt(h.var((0, 1, 2)) + 1e-5) * p["gain"] + p["shift"]
    h = pooled(jax.nn.relu(h))
    h = jax.nn.relu(convolved(p["second"], h) + h @ p["skip"])
    return h.mean((1, 2)) @ p["head"]


def residual_parameters() -> Any:
    return {
        "first": floats(3, 3, 3, 8, scale=0.3),
        "gain": 1 + floats(8, scale=0.1),
        "shift": floats(8, scale=0.1),
        "second": floats(3, 3, 8, 16, scale=0.2),
        "skip": floats(8, 16, scale=0.3),
        "head": floats(16, 10, scale=0.3),
    }


# Loops.


def recurrent(p: Any, xs: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ p["recur"] + x @ p["take"] + p["bias"])
        return h, h

    return lax.scan(step, jnp.zeros((4, 32)), xs)[1]


def trained(weight: Any, xs: Any, ys: Any) -> Any:
    def step(weight: Any, pair: Any) -> Any:
        x, y = pair
        return weight - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(weight), None

    return lax.scan(step, weight, (xs, ys))[0]


def counted(weight: Any, x: Any) -> Any:
    return lax.while_loop(lambda state: state[1] < 5, lambda state: (jnp.tanh(state[0] @ weight), state[1] + 1), (x, 0))


def sharded(weight: Any, x: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    part = PartitionSpec("i")

    def inner(weight: Any, x: Any) -> Any:
        return lax.psum(jax.nn.relu(x @ weight) @ weight, "i")

    return jax.shard_map(inner, mesh=mesh, in_specs=(PartitionSpec(), part), out_specs=PartitionSpec())(weight, x)


def dropped(weight: Any, x: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return jnp.where(keep, x @ weight / 0.5, 0) @ weight + jax.random.normal(jax.random.key(1), x.shape)


def squared(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: jnp.mean(function(*arguments) ** 2)


_SQUARE, _ROWS = floats(16, 16, scale=0.3), floats(4, 16)
_TOKENS = np.array([1, 3, 3, 5])
_RECURRENT = {"recur": floats(32, 32, scale=0.1), "take": floats(16, 32, scale=0.2), "bias": floats(32)}
_SEQUENCE = floats(6, 4, 16)
_TEXT = floats(2, 8, WIDTH)
_IMAGES = floats(2, 8, 8, 3)

CASES: dict[str, Case] = {
    "mlp": Case(mlp, (mlp_parameters(), _ROWS), contractions=3),
    "mlp step": Case(jax.value_and_grad(mlp_loss), (mlp_parameters(), _ROWS, floats(4, 8)), 0.03, 8),
    "block step": Case(jax.value_and_grad(block_loss), (block_parameters(), _TEXT, floats(2, 8, WIDTH)), 0.03, 17),
    "cross entropy step": Case(
        jax.value_and_grad(lambda w, x, t: -jnp.mean(jax.nn.log_softmax(jax.nn.relu(x @ w) @ w)[jnp.arange(4), t])),
        (_SQUARE, _ROWS, _TOKENS),
        0.03,
        5,
    ),
    "recurrent step": Case(jax.grad(squared(recurrent)), (_RECURRENT, _SEQUENCE), 0.04, 5),
    "while": Case(counted, (_SQUARE, _ROWS), 0.03),
    "sum in a loop": Case(
        lambda w, x: lax.fori_loop(0, 10, lambda i, total: total + x @ w, jnp.zeros((4, 16))), (_SQUARE, _ROWS)
    ),
    "training loop": Case(trained, (floats(16, 8, scale=0.3), floats(6, 32, 16), floats(6, 32, 8)), 0.003, 2),
    "cond": Case(
        lambda i, w, x: lax.cond(i > 0, lambda x: jax.nn.relu(x @ w) @ w, lambda x: x @ w @ w, x),
        (np.int32(1), _SQUARE, _ROWS),
        contractions=4,
    ),
    "convolutions step": Case(jax.grad(squared(residual_network)), (residual_parameters(), _IMAGES), 0.04, 10),
    "argsort": Case(
        lambda w, x: jnp.take_along_axis(x, jnp.argsort(x @ w, -1), -1) @ w, (_SQUARE, _ROWS), contractions=2
    ),
    "scatter": Case(lambda w, x, i: jnp.zeros((8, 16)).at[i].add(x @ w) @ w, (_SQUARE, _ROWS, _TOKENS), contractions=2),
    "embedding step": Case(
        jax.grad(lambda e, w, i, y: jnp.mean((jnp.tanh(e[i] @ w) - y) ** 2), (0, 1)),
        (floats(20, 16), _SQUARE, _TOKENS, _ROWS),
        0.03,
        3,
    ),
    "random numbers": Case(dropped, (_SQUARE, _ROWS), contractions=2),
    "fourier": Case(lambda w, x: jnp.fft.irfft(jnp.fft.rfft(x @ w)) @ w, (_SQUARE, _ROWS), contractions=2),
    "cholesky": Case(lambda w, x: jnp.linalg.cholesky(jnp.eye(16) + w.T @ w) @ x.T, (_SQUARE, _ROWS), contractions=2),
    "shard_map": Case(sharded, (_SQUARE, _ROWS), contractions=2),
    "associative scan": Case(
        lambda w, x: lax.associative_scan(jnp.multiply, jax.nn.sigmoid(x @ w)) @ w, (_SQUARE, _ROWS), contractions=2
    ),
    "second derivative": Case(jax.hessian(lambda w: jnp.sum(jnp.tanh(w @ w))), (floats(6, 6),), 0.06, 9),
    "low in parts": Case(
        lambda a, b: (a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16)).astype(jnp.float32) @ b,
        (_SQUARE, _SQUARE),
        contractions=2,
    ),
    "highest precision": Case(
        lambda a, b: jnp.dot(a, b, precision="highest") @ b, (_SQUARE, _SQUARE), contractions=2, asked=1
    ),
    "exact gelu": Case(lambda w, x: jax.nn.gelu(x @ w, approximate=False) @ w, (_SQUARE, _ROWS), contractions=2),
    "ragged": Case(
        lambda x, w, sizes: lax.ragged_dot(x, w, sizes), (floats(8, 16), floats(2, 16, 4), np.array([3, 5], np.int32))
    ),
}


def lowered(case: Case) -> Any:
    """The program of a case; no argument is dropped."""
    return jax.jit(case.function, keep_unused=True).lower(*case.arguments)


def arrays(case: Case) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(case.arguments)]
