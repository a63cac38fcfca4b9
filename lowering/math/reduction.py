"""Reductions: sums, products, extremes, moments, norms; of whole dimensions and of segments.

Halves are reduced in float32 and rounded once at the end.  As in most of
torch, an empty list of dimensions means all of them.  Sorting, ranks and running reductions are in `ordering`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.math import ordering  # noqa: F401  (registers its lowerings)
from xla_amp.lowering.operand import as_dtype, axes, opmath, sums_of_rows, up
from xla_amp.lowering.registry import register

Dim = int | Sequence[int] | None


# -- sums and products: `dtype`, when given, is taken on before reducing; it is the result's --------------------------


@register("sum", "sum.dim_IntList")
def sum_(
    x: jax.Array, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None, out: Any, platform: str
) -> jax.Array:
    """Sum; of integers and booleans as int64 unless `dtype` says otherwise."""
    over = sorted(axes(dim, x.ndim))
    x = as_dtype(x, opmath(out.dtype))
    if 0 < len(over) < x.ndim and over == list(range(len(over))):
        (total,) = sums_of_rows([x], len(over), platform)
        return total.reshape(out.shape)
    return jnp.sum(x, axis=tuple(over), keepdims=keepdim)


@register("mean", "mean.dim")
def mean(x: jax.Array, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None, out: Any) -> jax.Array:
    """Arithmetic mean."""
    return jnp.mean(as_dtype(x, opmath(out.dtype)), axis=axes(dim, x.ndim), keepdims=keepdim)


@register("prod", "prod.dim_int")
def prod(x: jax.Array, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None, out: Any) -> jax.Array:
    """Product; of integers and booleans as int64 unless `dtype` says otherwise."""
    return jnp.prod(as_dtype(x, opmath(out.dtype)), axis=axes(dim, x.ndim), keepdims=keepdim)


# -- extremes: NaN wins, the first of equals is reported --------------------------------------------------------------

_EXTREMES: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "max": (jnp.max, lax.argmax),
    "min": (jnp.min, lax.argmin),
}


def _register_extreme(name: str, extreme: Callable[..., jax.Array], argument: Callable[..., jax.Array]) -> None:
    def over(x: jax.Array, dim: Dim = None, keepdim: bool = False) -> jax.Array:
        return extreme(x, axis=axes(dim, x.ndim), keepdims=keepdim)

    def position(x: jax.Array, dim: int | None, *, out: Any) -> jax.Array:
        if dim is None or x.ndim == 0:
            x, dim = x.reshape(-1), 0
        index = np.int32 if x.size < 2**31 else np.int64
        return argument(x, dim % x.ndim, index).reshape(out.shape)

    def both(x: jax.Array, dim: int, keepdim: bool = False, *, out: Any) -> tuple[jax.Array, jax.Array]:
        return over(x, dim, keepdim), position(x, dim, out=out)

    def only_position(x: jax.Array, dim: int | None = None, keepdim: bool = False, *, out: Any) -> jax.Array:
        return position(x, dim, out=out)

    register(name, f"a{name}")(over)
    register(f"{name}.dim")(both)
    register(f"arg{name}")(only_position)


for _name, (_extreme, _argument) in _EXTREMES.items():
    _register_extreme(_name, _extreme, _argument)


@register("aminmax", "_aminmax", "_aminmax.dim")
def aminmax(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Least and greatest element."""
    axis = axes(dim, x.ndim)
    return jnp.min(x, axis=axis, keepdims=keepdim), jnp.max(x, axis=axis, keepdims=keepdim)


# -- truth and counts -------------------------------------------------------------------------------------------------


@register("all", "all.dim", "all.dims", "_is_all_true")
def all_(x: jax.Array, dim: Dim = None, keepdim: bool = False) -> jax.Array:
    """Whether no element is zero."""
    return jnp.all(x, axis=axes(dim, x.ndim), keepdims=keepdim)


@register("any", "any.dim", "any.dims", "_is_any_true")
def any_(x: jax.Array, dim: Dim = None, keepdim: bool = False) -> jax.Array:
    """Whether any element is not zero."""
    return jnp.any(x, axis=axes(dim, x.ndim), keepdims=keepdim)


@register("histc")
def histc(x: jax.Array, bins: int = 100, min: Any = 0, max: Any = 0) -> jax.Array:  # schema names
    """Counts in `bins` equal bins of [min, max], or of the data's range if both are equal."""
    x = up(x.reshape(-1))
    if not x.size:
        return jnp.zeros((bins,), x.dtype)
    low, high = as_dtype(min, x.dtype), as_dtype(max, x.dtype)
    own = low == high
    low, high = jnp.where(own, jnp.min(x), low), jnp.where(own, jnp.max(x), high)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    inside = (x >= low) & (x <= high)
    index = jnp.clip(((x - low) / (high - low) * bins).astype(jnp.int32), 0, bins - 1)
    return jnp.zeros((bins,), x.dtype).at[jnp.where(inside, index, bins)].add(1, mode="drop")


# -- moments: two passes in opmath; inf or NaN if the correction is not below the number of elements ------------------


@register("var_mean.correction", static=("correction",))
def var_mean(
    x: jax.Array, dim: Dim = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Variance and mean."""
    axis, x = axes(dim, x.ndim), up(x)
    center = jnp.mean(x, axis=axis, keepdims=True)
    count = math.prod(x.shape[a] for a in axis)
    freedom = max(count - (1 if correction is None else correction), 0)
    squares = jnp.sum(jnp.square(jnp.abs(x - center)), axis=axis, keepdims=keepdim)
    return squares / np.asarray(freedom, squares.dtype), center if keepdim else jnp.squeeze(center, axis)


@register("var.correction", static=("correction",))
def var(x: jax.Array, dim: Dim = None, *, correction: Any = None, keepdim: bool = False) -> jax.Array:
    """Variance with divisor ``count - correction`` (1 by default)."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


# -- norms ------------------------------------------------------------------------------------------------------------


def vector_norm(x: jax.Array, order: Any, axis: tuple[int, ...], keepdim: bool) -> jax.Array:
    """The `order`-norm along `axis`; 0 counts nonzero elements, inf and -inf give the greatest and least magnitude."""
    size = jnp.abs(x)
    if order == 0:
        return jnp.sum(as_dtype(size != 0, size.dtype), axis=axis, keepdims=keepdim)
    if order == 1:
        return jnp.sum(size, axis=axis, keepdims=keepdim)
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, axis=axis, keepdims=keepdim))
    if order == math.inf:
        return jnp.max(size, axis=axis, keepdims=keepdim)
    if order == -math.inf:
        return jnp.min(size, axis=axis, keepdims=keepdim)
    power = np.asarray(order, size.dtype)
    return jnp.power(jnp.sum(jnp.power(size, power), axis=axis, keepdims=keepdim), 1 / power)


@register("linalg_vector_norm", static=("ord",))
def linalg_vector_norm(
    x: jax.Array,
    ord: Any = 2,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,  # schema names
) -> jax.Array:
    """The vector norm of order `ord`, computed in `dtype` if given."""
    x = x if dtype is None else as_dtype(x, dtype)
    return vector_norm(up(x), ord, axes(dim, x.ndim), keepdim)


@register("logsumexp")
def logsumexp(x: jax.Array, dim: Dim, keepdim: bool = False, *, out: Any) -> jax.Array:
    """log(sum(exp(x))) without overflow."""
    return jax.nn.logsumexp(as_dtype(x, opmath(out.dtype)), axis=axes(dim, x.ndim), keepdims=keepdim)


# ---- segments --------------------------------------------------------------------------------------------------------


_NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -np.inf, "min": np.inf, "prod": 1.0}


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The run of each row; rows are numbered over all leading axes together."""

    run: jax.Array
    """int [rows]: the index of the row's run, or `count` for a row outside all runs."""
    lengths: jax.Array
    """[count]: rows in each run."""
    axis: int

    @property
    def count(self) -> int:
        return math.prod(self.lengths.shape)

    def rows(self, x: jax.Array) -> jax.Array:
        """`x` as [rows or runs, the rest]."""
        return x.reshape(math.prod(x.shape[: self.axis + 1]), math.prod(x.shape[self.axis + 1 :]))

    def reduced(self, rows: jax.Array, start: Any, how: str) -> jax.Array:
        """[count, the rest]: `start` combined with the rows of each run by the method `how` of ``x.at``."""
        empty = jnp.full((self.count, rows.shape[1]), start, rows.dtype)
        result: jax.Array = getattr(empty.at[self.run], how)(rows, mode="drop")
        return result

    def spread(self, runs: jax.Array) -> jax.Array:
        """[rows, the rest]: the value of each row's run, 0 for a row outside all runs."""
        return runs.at[self.run].get(mode="fill", fill_value=0)


def _runs(data: jax.Array, lengths: jax.Array | None, offsets: jax.Array | None, axis: int) -> _Runs:
    given = lengths if lengths is not None else offsets
    if given is None:
        raise ValueError("segment_reduce expects lengths or offsets, got neither")
    axis = axis % data.ndim
    table = as_dtype(given.reshape(-1, given.shape[-1]), np.int64)
    if lengths is not None:
        ends = jnp.cumsum(table, axis=1)
        starts = ends - table
    else:
        starts, ends = table[:, :-1], table[:, 1:]
    batch, count = starts.shape
    row = jnp.arange(data.shape[axis])
    run = jax.vmap(lambda edges: jnp.searchsorted(edges, row, side="right"))(ends)
    first = starts[:, :1] if count else jnp.zeros((batch, 1), np.int64)
    legal = (run < count) & (row >= first)
    run = jnp.where(legal, run + np.arange(batch)[:, None] * count, batch * count)
    return _Runs(run.reshape(-1), (ends - starts).reshape(-1), axis)


_SCATTER = {"sum": "add", "mean": "add", "max": "max", "min": "min", "prod": "multiply"}


@register("segment_reduce")
def segment_reduce(
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    indices: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
    out: jax.ShapeDtypeStruct,
) -> jax.Array:
    """A run without rows gives `initial`; without `initial` NaN for "mean", otherwise the neutral element."""
    runs, rows = _runs(data, lengths, offsets, axis), up(data)
    start = as_dtype(_NEUTRAL[reduce] if initial is None else initial, rows.dtype)
    result = runs.reduced(runs.rows(rows), start, _SCATTER[reduce])
    if reduce == "mean":
        size = as_dtype(runs.lengths, rows.dtype)[:, None]
        empty = np.asarray(np.nan, rows.dtype) if initial is None else start
        result = jnp.where(size > 0, result / jnp.maximum(size, 1), empty)
    return result.reshape(out.shape)


@register("_segment_reduce_backward")
def segment_reduce_backward(
    grad: jax.Array,
    output: jax.Array,
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    initial: Any = None,
) -> jax.Array:
    """Rows that share a maximum or minimum share its gradient."""
    runs = _runs(data, lengths, offsets, axis)
    rows, upstream = runs.rows(up(data)), runs.rows(up(grad))
    mine = runs.spread(upstream)
    if reduce == "mean":
        mine = runs.spread(upstream / jnp.maximum(as_dtype(runs.lengths, rows.dtype), 1)[:, None])
    elif reduce in ("max", "min"):
        chosen = (rows == runs.spread(runs.rows(up(output)))) | jnp.isnan(rows)
        several = runs.reduced(as_dtype(chosen, rows.dtype), 0, "add")
        mine = jnp.where(chosen, runs.spread(upstream / jnp.maximum(several, 1)), 0)
    elif reduce == "prod":
        mine = mine * _product_of_others(runs, rows, 1 if initial is None else initial)
    return mine.reshape(data.shape)


def _product_of_others(runs: _Runs, rows: jax.Array, initial: Any) -> jax.Array:
    """For each row the product of the other rows of its run and `initial`, without division by 0."""
    zero = rows == 0
    zeros = as_dtype(zero, rows.dtype)
    product = runs.reduced(jnp.where(zero, 1, rows), as_dtype(initial, rows.dtype), "multiply")
    other_zeros = runs.spread(runs.reduced(zeros, 0, "add")) - zeros
    others = runs.spread(product) / jnp.where(zero, 1, rows)
    return jnp.where(other_zeros > 0, 0, others)
