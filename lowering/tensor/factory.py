"""Tensor creation: constants, ranges, triangle indices, windows.  Shape and dtype are those of `out`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
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
