"""Segment reductions: ``segment_reduce`` and its gradient.

Segments (runs of rows) follow each other along one axis.  `lengths` has the length of each, or `offsets` where each
begins and ends.  Both have the axes before that axis too: each index there has separate segments.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register

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
