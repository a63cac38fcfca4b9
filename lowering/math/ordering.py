"""Operations that order or count elements: sorting, ranks, running reductions, searching, histograms.

NaN counts as the greatest value, as in torch.  As in torch, a 0-d tensor has one axis of size 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.operand import as_dtype, opmath
from xla_amp.lowering.registry import register

_Results = TypeVar("_Results", jax.Array, tuple[jax.Array, jax.Array])


def _along(function: Callable[[jax.Array], _Results], x: jax.Array, dim: int, keepdim: bool = True) -> _Results:
    """`function` of `x` with `dim` as its last axis; that axis of the results moves back, or is dropped."""
    ndim = max(x.ndim, 1)
    results = function(jnp.moveaxis(x.reshape(x.shape or (1,)), dim, -1))

    def back(y: jax.Array) -> jax.Array:
        y = jnp.moveaxis(y, -1, dim % ndim) if keepdim else jnp.squeeze(y, -1)
        return y.reshape(()) if x.ndim == 0 else y

    moved: _Results = jax.tree.map(back, results)
    return moved


# -- sorting ----------------------------------------------------------------------------------------------------------


def _sorted(x: jax.Array, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    """Stable sort of the last axis: values and their former positions."""
    positions = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    if not descending:
        values, positions = lax.sort((x, positions), num_keys=1)
        return values, positions
    # Flip, sort, flip: equal elements stay in order, and NaN comes first.
    values, positions = lax.sort((jnp.flip(x, -1), jnp.flip(positions, -1)), num_keys=1)
    return jnp.flip(values, -1), jnp.flip(positions, -1)


@register("sort")
def sort(x: jax.Array, dim: int = -1, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    """Sorted values and their positions."""
    return _along(functools.partial(_sorted, descending=descending), x, dim)


@register("sort.stable")
def sort_stable(
    x: jax.Array, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Sorted values and their positions; always stable."""
    return sort(x, dim, descending)


@register("topk")
def topk(
    x: jax.Array,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # schema names
) -> tuple[jax.Array, jax.Array]:
    """The `k` greatest (or least) values in order, and their positions."""

    def last_axis(y: jax.Array) -> tuple[jax.Array, jax.Array]:
        # torch returns the one value of a 0-d tensor even for k = 0.
        values, positions = lax.top_k(_rank_key(y, largest), k if x.ndim else 1)
        return _from_rank_key(values, y.dtype, largest), positions

    return _along(last_axis, x, dim)


def _rank_key(x: jax.Array, largest: bool) -> jax.Array:
    """A key for `lax.top_k`: `x`, or its negative for the least values.

    NaN is made positive: XLA ranks a NaN by its sign bit, and hardware makes NaN of either sign.
    """
    if x.dtype.kind in "iub":
        x = as_dtype(x, jnp.uint8) if x.dtype == jnp.bool_ else x
        return x if largest else ~x
    x = jnp.where(jnp.isnan(x), np.asarray(np.nan, x.dtype), x)
    return x if largest else -x


def _from_rank_key(key: jax.Array, dtype: Any, largest: bool) -> jax.Array:
    if np.dtype(dtype).kind in "iub":
        return as_dtype(key if largest else ~key, dtype)
    return key if largest else -key


# -- ranks ------------------------------------------------------------------------------------------------------------


def _pick(values: jax.Array, positions: jax.Array, rank: Any) -> tuple[jax.Array, jax.Array]:
    """The elements at `rank` of the sorted last axis, which stays with size 1."""
    take = functools.partial(jnp.take_along_axis, indices=jnp.broadcast_to(rank, (*values.shape[:-1], 1)), axis=-1)
    return take(values, mode="clip"), take(positions, mode="clip")


@register("kthvalue")
def kthvalue(x: jax.Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The `k`-th least value (from 1) and its position."""
    return _along(lambda y: _pick(*_sorted(y), k - 1), x, dim, keepdim)


def _median(x: jax.Array, skip_nan: bool) -> tuple[jax.Array, jax.Array]:
    values, positions = _sorted(x)
    count = jnp.sum(values == values, axis=-1, keepdims=True)  # without NaN, which is sorted to the end
    whole = count == x.shape[-1]
    rank = (count - 1) // 2
    if not skip_nan:
        rank = jnp.where(whole, rank, count)  # the first NaN
    return _pick(values, positions, jnp.maximum(rank, 0))


def _register_median(name: str, skip_nan: bool) -> None:
    def over(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
        return _along(lambda y: _median(y, skip_nan), x, dim, keepdim)

    def of_all(x: jax.Array) -> jax.Array:
        if not x.size:  # NaN, which is 0 as an integer
            return jnp.asarray(np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0, x.dtype)
        return over(x.reshape(-1), 0)[0]

    register(f"{name}.dim")(over)
    register(name)(of_all)


_register_median("median", False)  # the lower of two middle elements; NaN if any element is NaN
_register_median("nanmedian", True)


@register("mode")
def mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The most frequent value (the least of several) and its last position."""

    def last_axis(y: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, positions = _sorted(y)
        index = lax.broadcasted_iota(jnp.int32, y.shape, y.ndim - 1)
        first = jnp.concatenate([jnp.ones_like(index[..., :1]), values[..., 1:] != values[..., :-1]], -1) != 0
        run_start = lax.cummax(jnp.where(first, index, 0), y.ndim - 1)
        return _pick(values, positions, jnp.argmax(index - run_start, axis=-1, keepdims=True))

    return _along(last_axis, x, dim, keepdim)


# -- running reductions: halves in float32 ----------------------------------------------------------------------------


def _running(function: Callable[..., jax.Array], x: jax.Array, dim: int, dtype: Any) -> jax.Array:
    return _along(lambda y: function(as_dtype(y, opmath(dtype)), axis=y.ndim - 1), x, dim)


@register("cumsum")
def cumsum(x: jax.Array, dim: int, *, dtype: Any = None, out: Any) -> jax.Array:
    """Cumulative sum; int64 for integers unless `dtype` is given."""
    return _running(lax.cumsum, x, dim, out.dtype)


@register("cumprod")
def cumprod(x: jax.Array, dim: int, *, dtype: Any = None, out: Any) -> jax.Array:
    """Cumulative product; int64 for integers unless `dtype` is given."""
    return _running(lax.cumprod, x, dim, out.dtype)


@register("logcumsumexp", "_logcumsumexp")
def logcumsumexp(x: jax.Array, dim: int, *, out: Any) -> jax.Array:
    """log of the cumulative sum of exp(x), without overflow."""
    return _running(lax.cumlogsumexp, x, dim, out.dtype)


def _register_running_extreme(name: str, function: Callable[..., jax.Array]) -> None:
    def last_axis(y: jax.Array) -> tuple[jax.Array, jax.Array]:
        if y.dtype == jnp.bool_:
            values, positions = last_axis(as_dtype(y, jnp.uint8))
            return as_dtype(values, jnp.bool_), positions
        axis = y.ndim - 1
        values = function(y, axis=axis)
        index = lax.broadcasted_iota(jnp.int32, y.shape, axis)
        taken = (y == values) | (y != y)  # the last of equal values, and every NaN
        return values, lax.cummax(jnp.where(taken, index, 0), axis=axis)

    register(name)(lambda x, dim: _along(last_axis, x, dim))


_register_running_extreme("cummax", lax.cummax)
_register_running_extreme("cummin", lax.cummin)


# -- searching --------------------------------------------------------------------------------------------------------


@register("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    sequence: jax.Array,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
    common: Any,
) -> jax.Array:
    """Insertion positions of the elements of `x` in the sorted rows of `sequence` (one row, or one per row of `x`)."""
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    dtype = common if sorter is None else jnp.promote_types(sequence.dtype, x.dtype)
    sequence, x = as_dtype(sequence, dtype), as_dtype(x, dtype)
    search = functools.partial(jnp.searchsorted, side="right" if right or side == "right" else "left")
    if sequence.ndim == 1:
        return search(sequence, x)
    if x.size == 0:
        return jnp.zeros(x.shape, jnp.int32)
    rows = sequence.reshape(-1, sequence.shape[-1])
    return jax.vmap(search)(rows, x.reshape(rows.shape[0], -1)).reshape(x.shape)


@register("bucketize.Tensor", "bucketize.Scalar")
def bucketize(x: Any, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False, common: Any) -> jax.Array:
    """The index of each element's bucket between sorted `boundaries`."""
    return searchsorted(boundaries, x, right=right, common=common)


# ---- counting --------------------------------------------------------------------------------------------------------


def _histogram(x: jax.Array, edges: Sequence[jax.Array], weight: jax.Array | None, density: bool) -> jax.Array:
    """Counts of points, which are the rows of `x`, between `edges` of each axis; the last bin holds both its edges."""
    weights = None if weight is None else weight.reshape(-1)
    return jnp.histogramdd(x.reshape(-1, len(edges)), edges, weights=weights, density=density)[0]


@register("histogram.bins_tensor")
def histogram(
    x: jax.Array, bins: jax.Array, *, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _histogram(x, [bins], weight, density), bins


@register("histogram.bin_ct")
def histogram_of_equal_bins(
    x: jax.Array,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> tuple[jax.Array, jax.Array]:
    (edges,) = edges_of_equal_bins(x.reshape(-1, 1), [bins], range=range)
    return _histogram(x, [edges], weight, density), edges


@register("_histogramdd_bin_edges")
def edges_of_equal_bins(
    x: jax.Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> list[jax.Array]:
    """Edges of equal bins of each axis over `range`, or from the least to the greatest of `x` (0 to 1 for no `x`)."""
    limits = zip(range[::2], range[1::2], strict=True) if range else [None if x.size else (0, 1)] * len(bins)
    columns = x.reshape(-1, x.shape[-1]).T
    return [jnp.histogram_bin_edges(*each) for each in zip(columns, bins, limits, strict=True)]


@register("_histogramdd_from_bin_cts")
def histogram_of_points_in_equal_bins(
    x: jax.Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> jax.Array:
    return _histogram(x, edges_of_equal_bins(x, bins, range=range), weight, density)


@register("_histogramdd_from_bin_tensors")
def histogram_of_points(
    x: jax.Array, bins: Sequence[jax.Array], *, weight: jax.Array | None = None, density: bool = False
) -> jax.Array:
    return _histogram(x, bins, weight, density)


@register("repeat_interleave.Tensor")
def repeat_interleave(repeats: jax.Array, *, output_size: int | None = None, out: Any) -> jax.Array:
    """0 to n - 1, each repeated `repeats` times; without `output_size` the engine computes the length."""
    length = math.prod(out.shape)
    ends = jnp.cumsum(as_dtype(repeats, np.int64))
    return jnp.searchsorted(ends, jnp.arange(length), side="right")
