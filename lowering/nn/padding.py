"""Constant, reflection and replication padding.

torch lists a (before, after) pair for each axis, last axis first; a negative amount crops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register


def _widths(amounts: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    """(before, after) per axis, first axis first."""
    pairs = [(amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


@register("constant_pad_nd", dynamic=("pad",))
def constant_pad(x: jax.Array, pad: Sequence[Any], value: Any = 0, *, out: Any) -> jax.Array:
    """Pad with `value`."""
    if not all(isinstance(width, int) for width in pad):
        return _pad_by_data(x, [before for before, _ in _widths(pad, x.ndim)], as_dtype(value, x.dtype), out.shape)
    edges = [(before, after, 0) for before, after in _widths(pad, x.ndim)]
    return lax.pad(x, as_dtype(value, x.dtype), edges)


def _pad_by_data(x: jax.Array, before: Sequence[Any], value: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x` padded to `shape`, with widths in front of it that are data."""
    for axis, (width, size) in enumerate(zip(before, shape, strict=True)):
        if isinstance(width, int) and size == x.shape[axis]:
            continue
        index = lax.iota(jnp.int32, size) - as_dtype(width, jnp.int32)
        inside = ((index >= 0) & (index < x.shape[axis])).reshape([-1 if d == axis else 1 for d in range(x.ndim)])
        x = jnp.where(inside, jnp.take(x, index, axis, mode="clip"), value)
    return x


def _pad(x: jax.Array, amounts: Sequence[int], mode: Literal["reflect", "edge"]) -> jax.Array:
    widths = _widths(amounts, x.ndim)
    x = jnp.pad(x, [(max(before, 0), max(after, 0)) for before, after in widths], mode=mode)
    start = [max(-before, 0) for before, _ in widths]
    stop = [size - max(-after, 0) for (_, after), size in zip(widths, x.shape, strict=True)]
    return lax.slice(x, start, stop)


def _register_padding(name: str, mode: Literal["reflect", "edge"]) -> None:
    def forward(x: jax.Array, padding: Sequence[int]) -> jax.Array:
        return _pad(x, padding, mode)

    def backward(grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
        grad = up(grad)  # sum the gradients of an element's copies in float32 for halves
        operand = jax.ShapeDtypeStruct(x.shape, grad.dtype)
        grad_x: jax.Array = jax.linear_transpose(lambda y: _pad(y, padding, mode), operand)(grad)[0]
        return grad_x

    for rank in (1, 2, 3):
        register(f"{name}_pad{rank}d")(forward)
        register(f"{name}_pad{rank}d_backward")(backward)


_register_padding("reflection", "reflect")
_register_padding("replication", "edge")
