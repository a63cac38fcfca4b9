"""Fourteen small JAX programs that name no low dtype, and what a library's autocast makes of them.

    python -P benchmarks/peers/autocast_programs.py xla_amp|grampax|jaxamp|mpx

prints one JSON object: program -> what was found.  `benchmarks/jax_peers.py` calls it in the environment of each peer;
only the peer, JAX, Flax, Haiku and NumPy are imported.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Function = Callable[..., jax.Array]
Program = Callable[[], tuple[Function, Any]]
"""Makes a loss ``f(params, x)`` and its parameters; x is float32 [8, 16]."""

_WIDTH = 16
_CONTRACTION = re.compile(r"stablehlo\.(?:dot_general|dot|convolution)\b.*")


def _weights(*shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(1), len(shapes))
    return [jax.random.normal(key, shape) / _WIDTH**0.5 for key, shape in zip(keys, shapes, strict=True)]


def _mean(y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(y))


def _nested_jit() -> tuple[Function, Any]:
    inner = jax.jit(lambda w, x: jnp.tanh(x @ w))
    outer = jax.jit(lambda w, x: inner(w, inner(w, x)))
    return lambda params, x: _mean(outer(params[0], x) @ params[1]), _weights((16, 16), (16, 4))


def _scan() -> tuple[Function, Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return _mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params[0])[0])

    return loss, _weights((3, 16, 16))


def _remat() -> tuple[Function, Any]:
    layer = jax.checkpoint(lambda w, x: jax.nn.gelu(x @ w))
    return lambda params, x: _mean(layer(params[1], layer(params[0], x))), _weights((16, 16), (16, 16))


def _custom_vjp() -> tuple[Function, Any]:
    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))
    return lambda params, x: _mean(jnp.tanh(product(x, params[0]))), _weights((16, 16))


def _cond() -> tuple[Function, Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return _mean(jax.lax.cond(x[0, 0] > 9, lambda x: x, lambda x: jnp.tanh(x @ params[0]), x) @ params[1])

    return loss, _weights((16, 16), (16, 16))


def _while() -> tuple[Function, Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        body = jax.lax.stop_gradient(params[0])
        y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ body)), (0, x))[1]
        return _mean(jax.lax.stop_gradient(y) @ params[1])

    return loss, _weights((16, 16), (16, 16))


def _attention() -> tuple[Function, Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        q, k, v = (x @ w for w in params)
        return _mean(jax.nn.softmax(q @ k.T / 4) @ v)

    return loss, _weights((16, 16), (16, 16), (16, 16))


def _convolution() -> tuple[Function, Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(x.reshape(2, 4, 4, 4), params[0], (1, 1), "SAME")
        return _mean(jax.nn.relu(y).reshape(8, -1) @ params[1])

    return loss, _weights((8, 4, 3, 3), (32, 4))


def _vmap() -> tuple[Function, Any]:
    return lambda params, x: _mean(jax.vmap(lambda row: jnp.tanh(params[0] @ row))(x)), _weights((16, 16))


def _grad_inside() -> tuple[Function, Any]:
    def energy(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return _mean(jax.grad(energy, argnums=1)(params[0], x))

    return loss, _weights((16, 16))


def _integers_and_random_numbers() -> tuple[Function, Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        tokens = jnp.arange(8) % 5
        kept = jax.random.bernoulli(jax.random.key(3), 0.5, (8, 16))
        return _mean(jnp.where(kept, params[0][tokens] + x, 0) @ params[1])

    return loss, _weights((5, 16), (16, 16))


def _precision() -> tuple[Function, Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return _mean(jnp.dot(jnp.tanh(x @ params[0]), params[1], precision=jax.lax.Precision.HIGHEST))

    return loss, _weights((16, 16), (16, 4))


def _flax() -> tuple[Function, Any]:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            h = nn.LayerNorm()(x)[None]
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, h)[0]
            return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))

    block = Block()
    return lambda params, x: _mean(block.apply(params, x)), block.init(jax.random.key(0), jnp.ones((8, 16)))


def _haiku() -> tuple[Function, Any]:
    import haiku as hk

    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 16])(x)))
    return lambda params, x: _mean(network.apply(params, x)), network.init(jax.random.key(0), jnp.ones((8, 16)))


PROGRAMS: dict[str, Program] = {
    "nested jit": _nested_jit,
    "scan": _scan,
    "remat": _remat,
    "custom_vjp": _custom_vjp,
    "cond": _cond,
    "while_loop": _while,
    "attention": _attention,
    "convolution": _convolution,
    "vmap": _vmap,
    "grad inside": _grad_inside,
    "integers, random numbers": _integers_and_random_numbers,
    "precision=": _precision,
    "Flax": _flax,
    "Haiku": _haiku,
}


def gradients_of(peer: str) -> Callable[[Function], Callable[..., Any]]:
    """``loss -> value_and_grad of it in bfloat16``, as the peer's own documentation does it."""
    if peer == "xla_amp":
        from xla_amp.jax import autocast

        return lambda loss: jax.value_and_grad(autocast(loss, dtype="bfloat16"))
    if peer == "jaxamp":
        import jaxamp

        return lambda loss: jax.value_and_grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16))
    if peer == "grampax":
        import grampax

        return lambda loss: jax.value_and_grad(grampax.autocast(loss))
    if peer == "mpx":
        import mpx

        mpx.set_half_precision_datatype(jnp.bfloat16)
        scaling = mpx.DynamicLossScaling(jnp.float32(1.0), jnp.float32(1.0))

        def gradients(loss: Function) -> Callable[..., Any]:
            found = mpx.filter_value_and_grad(loss, scaling)

            def value_and_grad(params: Any, x: jax.Array) -> Any:
                result = found(params, x)
                return result[0], result[-1]

            return value_and_grad

        return gradients
    raise ValueError(f"unknown peer {peer!r}: xla_amp, jaxamp, grampax or mpx")


def contractions(gradients: Callable[..., Any], *args: Any) -> tuple[int, int, int]:
    """(low, all, asked): products and convolutions that read no float32, all, and float32 ones of HIGHEST precision."""
    lines = _CONTRACTION.findall(jax.jit(gradients).lower(*args).as_text())
    operands = [line.rpartition(": (")[2].partition(") ->")[0] for line in lines]
    low = sum("xf32" not in each for each in operands)
    asked = sum("xf32" in each and "HIGHEST" in line for each, line in zip(operands, lines, strict=True))
    return low, len(lines), asked


def seconds_to_trace(gradients: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """The smallest CPU time of `repeats` traces, each with empty caches."""
    times = []
    for _ in range(repeats):
        jax.clear_caches()
        start = time.process_time()
        jax.jit(gradients).trace(*args)
        times.append(time.process_time() - start)
    return min(times)


def error(found: Any, expected: Any) -> float:
    """Relative Euclidean error of a pytree as one vector."""
    flat = [
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)]) for t in (found, expected)
    ]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


def examined(program: Program, wrap: Callable[[Function], Callable[..., Any]]) -> dict[str, Any]:
    """Errors against float32, dtypes, counts of contractions, seconds of tracing; or why the peer failed."""
    loss, params = program()
    x = jax.random.normal(jax.random.key(0), (8, _WIDTH))
    plain = jax.value_and_grad(loss)
    value, grads = jax.jit(plain)(params, x)
    try:
        found_value, found_grads = jax.jit(wrap(loss))(params, x)
        low, every, asked = contractions(wrap(loss), params, x)
    except Exception as failure:  # whatever the peer raises is the result
        return {"failed": f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:90]}"}
    kept = [leaf.dtype for leaf in jax.tree.leaves((found_value, found_grads))]
    expected = [leaf.dtype for leaf in jax.tree.leaves((value, grads))]
    errors = error(found_value, value), error(found_grads, grads)
    wanted = contractions(plain, params, x)[2]
    return {
        "errors": errors,
        "right": kept == expected and errors[0] < 0.02 and errors[1] < 0.05,
        "throughout": low + asked == every and asked == wanted,
        "low": low,
        "contractions": every,
        "asked": wanted,
        "kept": asked,
        "seconds": [seconds_to_trace(plain, params, x), seconds_to_trace(wrap(loss), params, x)],
    }


def main(peer: str) -> None:
    """Prints what was found."""
    try:
        wrap = gradients_of(peer)
    except Exception as failure:  # it does not import with this JAX
        failed = f"import: {type(failure).__name__}: {str(failure).strip().splitlines()[0][:90]}"
        print(json.dumps({name: {"failed": failed} for name in PROGRAMS}))
        return
    print(json.dumps({name: examined(program, wrap) for name, program in PROGRAMS.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
