"""Tensor creation: constants, ranges, triangle indices, windows.  Shape and dtype are those of `out`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from xla_amp.lowering.operand import as_dtype, opmath
from xla_amp.lowering.registry import register


@register("zeros", "zeros_like", "new_zeros", "zero")
def zeros(*_: Any, out: Any, **__: Any) -> jax.Array:
    """All zero."""
    return jnp.zeros(out.shape, out.dtype)


@register("ones", "ones_like", "new_ones")
def ones(*_: Any, out: Any, **__: Any) -> jax.Array:
    """All one."""
    return jnp.ones(out.shape, out.dtype)


@register("full", "full_like", "fill.Scalar", "fill.Tensor", "new_full", "scalar_tensor")
def full(*arguments: Any, out: Any, **_: Any) -> jax.Array:
    """The last argument everywhere, rounded to the result's dtype."""
    return jnp.broadcast_to(as_dtype(arguments[-1], out.dtype), out.shape)


# -- progressions: computed in float64, as torch on the CPU does (accscalar of float is double), or in integers -------


@register("arange", static=("end",))
def arange(end: Any, *, dtype: Any = None, out: Any) -> jax.Array:
    """0, 1, ... below `end`."""
    return arange_by(0, end, out=out)


@register("arange.start", "range", static=("start", "end"), dynamic=("start", "end"))
@register("arange.start_step", "range.step", static=("start", "end", "step"), dynamic=("start", "end"))
def arange_by(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, out: Any) -> jax.Array:
    """start, start + step, ... before `end` (``range``: including `end`)."""
    wide = jnp.int64 if out.dtype.kind in "iub" else jnp.float64
    return as_dtype(start, wide) + as_dtype(step, wide) * lax.iota(wide, out.shape[0])


def _triangle(row: int, col: int, offset: int = 0, *, upper: bool, dtype: Any = None, out: Any) -> jax.Array:
    """(2, n): the indices on and below a diagonal, or on and above it, row by row."""
    inside = jnp.tri(row, col, offset - 1) == 0 if upper else jnp.tri(row, col, offset)
    return jnp.stack(jnp.nonzero(inside, size=out.shape[1]))


register("tril_indices")(functools.partial(_triangle, upper=False))
register("triu_indices")(functools.partial(_triangle, upper=True))


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
