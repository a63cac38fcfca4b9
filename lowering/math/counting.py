"""Histograms, and ``repeat_interleave``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.operand import as_dtype
from xla_amp.lowering.registry import register


def _histogram(x: jax.Array, edges: jax.Array, weight: jax.Array | None, density: bool) -> tuple[jax.Array, jax.Array]:
    """Counts between `edges`; each bin holds its lower edge, the last both."""
    x = x.reshape(-1)
    weight = jnp.ones_like(x) if weight is None else weight.reshape(-1)
    bins = edges.shape[0] - 1
    bin_index = jnp.clip(jnp.searchsorted(edges, x, side="right") - 1, 0, bins - 1)
    inside = (x >= edges[0]) & (x <= edges[-1])
    counts = jnp.zeros(bins, x.dtype).at[bin_index].add(jnp.where(inside, weight, 0))
    if density:
        counts = counts / (jnp.sum(counts) * jnp.diff(edges))
    return counts, edges


def _equal_bins(x: jax.Array, bins: int, limits: Sequence[float] | None) -> jax.Array:
    """Edges of `bins` equal bins between `limits`, or from the least to the greatest of `x` (0 to 1 for no `x`)."""
    if limits is not None:
        low, high = (jnp.asarray(end, x.dtype) for end in limits)
    elif x.size:
        low, high = jnp.min(x), jnp.max(x)
    else:
        low, high = jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
    half = np.asarray(0.5, x.dtype)
    low, high = jnp.where(low == high, low - half, low), jnp.where(low == high, high + half, high)
    return jnp.linspace(low, high, bins + 1, dtype=x.dtype)


@register("histogram.bins_tensor")
def histogram(
    x: jax.Array, bins: jax.Array, *, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _histogram(x, bins, weight, density)


@register("histogram.bin_ct")
def histogram_of_equal_bins(
    x: jax.Array,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Bins of equal width over `range`, or from the least to the greatest element."""
    return _histogram(x, _equal_bins(x, bins, range), weight, density)


# -- histograms in several dimensions: points are the rows of `x` ------------------------------------------------------


def _histogram_of_points(
    x: jax.Array, edges: Sequence[jax.Array], weight: jax.Array | None, density: bool
) -> jax.Array:
    points = x.reshape(-1, x.shape[-1])
    weights = jnp.ones(points.shape[0], x.dtype) if weight is None else weight.reshape(-1)
    bin_indices, inside = [], jnp.ones(points.shape[0], bool)
    for axis, along in enumerate(edges):
        value = points[:, axis]
        bin_index = jnp.searchsorted(along, value, side="right") - 1
        bin_indices.append(jnp.clip(bin_index, 0, along.shape[0] - 2))
        inside = inside & (value >= along[0]) & (value <= along[-1])
    counts = jnp.zeros([along.shape[0] - 1 for along in edges], x.dtype)
    counts = counts.at[tuple(bin_indices)].add(jnp.where(inside, weights, 0))
    if density:
        counts = counts / jnp.sum(counts)
        for axis, along in enumerate(edges):
            counts = counts / jnp.diff(along).reshape([-1 if i == axis else 1 for i in range(counts.ndim)])
    return counts


@register("_histogramdd_bin_edges")
def edges_of_equal_bins(
    x: jax.Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> list[jax.Array]:
    points, ends = x.reshape(-1, x.shape[-1]), iter(range or ())
    limits = [(next(ends), next(ends)) if range else None for _ in bins]
    return [_equal_bins(points[:, axis], count, limits[axis]) for axis, count in enumerate(bins)]


@register("_histogramdd_from_bin_cts")
def histogram_of_points_in_equal_bins(
    x: jax.Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> jax.Array:
    return _histogram_of_points(x, edges_of_equal_bins(x, bins, range=range), weight, density)


@register("_histogramdd_from_bin_tensors")
def histogram_of_points(
    x: jax.Array, bins: Sequence[jax.Array], *, weight: jax.Array | None = None, density: bool = False
) -> jax.Array:
    return _histogram_of_points(x, bins, weight, density)


@register("repeat_interleave.Tensor")
def repeat_interleave(repeats: jax.Array, *, output_size: int | None = None, out: Any) -> jax.Array:
    """0 to n - 1, each repeated `repeats` times; without `output_size` the engine computes the length."""
    length = math.prod(out.shape)
    ends = jnp.cumsum(as_dtype(repeats, np.int64))
    return jnp.searchsorted(ends, jnp.arange(length), side="right")
