"""Tensor creation: constants, ranges, triangle indices, windows.  Shape and dtype are those of `out`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from xla_amp.lowering.operand import as_dtype, opmath
from xla_amp.lowering.registry import register


def _filled(value: Any, out: Any) -> jax.Array:
    return jnp.broadcast_to(as_dtype(value, out.dtype), out.shape)


@register("zeros", "zeros_like", "new_zeros", "zero")
def zeros(*_: Any, out: Any, **__: Any) -> jax.Array:
    """All zero."""
    return jnp.zeros(out.shape, out.dtype)


@register("ones", "ones_like", "new_ones")
def ones(*_: Any, out: Any, **__: Any) -> jax.Array:
    """All one."""
    return jnp.ones(out.shape, out.dtype)


@register("full", "full_like", "fill.Scalar", "fill.Tensor")
def full(_: Any, fill_value: Any, *, dtype: Any = None, out: Any) -> jax.Array:
    """`fill_value` everywhere, rounded to the result's dtype."""
    return _filled(fill_value, out)


@register("new_full")
def new_full(_: Any, __: Any, fill_value: Any, *, dtype: Any = None, out: Any) -> jax.Array:
    """`full` of a given size."""
    return _filled(fill_value, out)


@register("scalar_tensor")
def scalar_tensor(value: Any, *, dtype: Any = None, out: Any) -> jax.Array:
    """A number as a 0-d tensor."""
    return _filled(value, out)


@register("eye", "eye.m")
def eye(n: int, m: int | None = None, *, dtype: Any = None, out: Any) -> jax.Array:
    """Ones on the diagonal."""
    return jnp.eye(out.shape[0], out.shape[1], dtype=out.dtype)


# -- progressions: computed in float64, as torch on the CPU does (accscalar of float is double), or in integers -------


def _wide(out: Any) -> Any:
    return jnp.int64 if out.dtype.kind in "iub" else jnp.float64


def _progression(start: Any, step: Any, out: Any) -> jax.Array:
    dtype = _wide(out)
    return as_dtype(start, dtype) + as_dtype(step, dtype) * lax.iota(dtype, out.shape[0])


@register("arange", static=("end",))
def arange(end: Any, *, dtype: Any = None, out: Any) -> jax.Array:
    """0, 1, ... below `end`."""
    return _progression(0, 1, out)


@register("arange.start", "range", static=("start", "end"), dynamic=("start", "end"))
def arange_from(start: Any, end: Any, *, dtype: Any = None, out: Any) -> jax.Array:
    """start, start + 1, ... below `end` (``range``: including `end`)."""
    return _progression(start, 1, out)


@register("arange.start_step", "range.step", static=("start", "end", "step"), dynamic=("start", "end"))
def arange_by(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, out: Any) -> jax.Array:
    """start, start + step, ... before `end` (``range``: including `end`)."""
    return _progression(start, step, out)


def _between(start: Any, end: Any, count: int, dtype: Any) -> jax.Array:
    """`count` even steps; the second half is counted back from `end` so that it is exact, as in torch."""
    start, end = as_dtype(start, dtype), as_dtype(end, dtype)
    if count < 2:
        return jnp.broadcast_to(start, (count,))
    step = (end - start) / (count - 1)
    index = lax.iota(dtype, count)
    return jnp.where(index < count // 2, start + step * index, end - step * (count - 1 - index))


def _whole(start: Any, end: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The ends of a sequence of `dtype`: torch truncates them first if it is of integers."""
    ends = as_dtype(start, jnp.float64), as_dtype(end, jnp.float64)
    return ends if jnp.issubdtype(dtype, np.inexact) else (jnp.trunc(ends[0]), jnp.trunc(ends[1]))


_POINTS = ("", ".Scalar_Tensor", ".Tensor_Scalar", ".Tensor_Tensor")


@register(*(f"linspace{points}" for points in _POINTS))
def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, out: Any) -> jax.Array:
    """`steps` numbers from `start` to `end`, both included."""
    return _between(*_whole(start, end, out.dtype), out.shape[0], jnp.float64)


@register(*(f"logspace{points}" for points in _POINTS))
def logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None, out: Any) -> jax.Array:
    """base ** linspace(start, end)."""
    exponents = _between(*_whole(start, end, out.dtype), out.shape[0], jnp.float64)
    return jnp.power(as_dtype(base, jnp.float64), exponents)


def _triangle_indices(keep: jax.Array, out: Any) -> jax.Array:
    return jnp.stack(jnp.nonzero(keep, size=out.shape[1]))


@register("tril_indices")
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None, out: Any) -> jax.Array:
    """(2, n): the indices on and below a diagonal, row by row."""
    return _triangle_indices(jnp.tri(row, col, offset, dtype=jnp.bool_), out)


@register("triu_indices")
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None, out: Any) -> jax.Array:
    """(2, n): the indices on and above a diagonal, row by row."""
    return _triangle_indices(~jnp.tri(row, col, offset - 1, dtype=jnp.bool_), out)


# -- windows: torch composes the others -------------------------------------------------------------------------------


@register("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta")
def kaiser_window(length: int, periodic: bool = True, beta: float = 12.0, *, dtype: Any = None, out: Any) -> jax.Array:
    """I0(beta sqrt(1 - x * x)) / I0(beta) for x from -1 to 1; a periodic one has one more point, left out."""
    points = length + 1 if periodic else length
    if length <= 1:
        return jnp.ones(out.shape, out.dtype)
    across = lax.iota(opmath(out.dtype), length) * (2 / (points - 1)) - 1
    inside = jnp.sqrt(jnp.maximum(1 - across * across, 0))
    return special.i0(beta * inside) / special.i0(jnp.asarray(beta, across.dtype))
