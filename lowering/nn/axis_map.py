"""Constant sparse linear maps along one axis: pooling windows and resampling taps.

Pooling and resampling act on each spatial axis separately.  Along one axis they are a sparse matrix with a few entries
in each row.  The matrix is known at trace time and kept in NumPy; the gradient is its transpose, also an `AxisMap`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)
class AxisMap:
    """A sparse matrix: row ``i`` is the sum of ``weight[i, t] * x[index[i, t]]`` over the taps ``t``.

    An entry with an index outside ``0 .. extent - 1`` is absent.
    """

    extent: int
    """Number of columns: the size of the input along the axis."""
    index: np.ndarray
    """int64 ``(rows, taps)``."""
    weight: np.ndarray | None = None
    """float64 ``(rows, taps)``, or ``None`` if every entry is 1."""

    @functools.cached_property
    def present(self) -> np.ndarray:
        """bool ``(rows, taps)``: which entries exist."""
        return (self.index >= 0) & (self.index < self.extent)

    @property
    def counts(self) -> np.ndarray:
        """int64 ``(rows,)``: how many entries each row has."""
        counts: np.ndarray = self.present.sum(axis=1)
        return counts

    @functools.cached_property
    def stride(self) -> tuple[int, int] | None:
        """``(stride, dilation)`` if ``index[i, t] = index[0, 0] + stride * i + dilation * t``, otherwise ``None``."""
        rows, taps = self.index.shape
        stride = int(self.index[1, 0] - self.index[0, 0]) if rows > 1 else 1
        dilation = int(self.index[0, 1] - self.index[0, 0]) if taps > 1 else 1
        regular = self.index[0, 0] + stride * np.arange(rows)[:, None] + dilation * np.arange(taps)
        return (stride, dilation) if stride > 0 and dilation > 0 and np.array_equal(regular, self.index) else None

    def taps(self, x: jax.Array, axis: int, fill: object) -> list[jax.Array]:
        """For each tap, the elements of `x` along `axis` that the rows read; absent entries read `fill`."""
        if self.stride is None:
            return [self._gather(x, axis, tap, fill) for tap in range(self.index.shape[1])]
        (stride, dilation), (rows, taps) = self.stride, self.index.shape
        first, last = int(self.index[0, 0]), int(self.index[-1, -1])
        config = [(0, 0, 0)] * x.ndim
        config[axis] = (-first, last + 1 - self.extent, 0)
        x = lax.pad(x, jnp.asarray(fill, x.dtype), config)
        span = (rows - 1) * stride + 1
        return [lax.slice_in_dim(x, tap * dilation, tap * dilation + span, stride, axis=axis) for tap in range(taps)]

    def _gather(self, x: jax.Array, axis: int, tap: int, fill: object) -> jax.Array:
        index, present = self.index[:, tap], self.present[:, tap]
        taken = jnp.take(x, np.where(present, index, 0), axis=axis, mode="clip")
        if present.all():
            return taken
        return jnp.where(broadcast_along(present, axis, x.ndim), taken, jnp.asarray(fill, x.dtype))

    def apply(self, x: jax.Array, axis: int) -> jax.Array:
        """The matrix times `x` along `axis` (non-negative), in the dtype of `x`."""
        rows, taps = self.index.shape
        if self.weight is None and np.array_equal(self.index.reshape(-1), np.arange(self.extent)):
            return jnp.sum(x.reshape(*x.shape[:axis], rows, taps, *x.shape[axis + 1 :]), axis=axis + 1, dtype=x.dtype)
        if self.weight is None and rows % self.extent == 0:
            repeats = rows // self.extent
            if np.array_equal(self.index[:, 0], np.arange(rows) // repeats) and taps == 1:
                return jnp.repeat(x, repeats, axis=axis)
        taps_of_x = self.taps(x, axis, 0)
        if self.weight is not None:
            weights = self.weight.astype(x.dtype).T
            taps_of_x = [
                tap * broadcast_along(weight, axis, x.ndim) for tap, weight in zip(taps_of_x, weights, strict=True)
            ]
        return functools.reduce(operator.add, taps_of_x)

    def transpose(self) -> AxisMap:
        """The transposed matrix."""
        rows, taps = np.nonzero(self.present)
        columns = self.index[rows, taps]
        order = np.argsort(columns, kind="stable")
        rows, taps, columns = rows[order], taps[order], columns[order]
        counts = np.bincount(columns, minlength=self.extent)
        slot = np.arange(columns.size) - np.repeat(np.cumsum(counts) - counts, counts)
        index = np.full((self.extent, max(1, int(counts.max(initial=0)))), -1, np.int64)
        index[columns, slot] = rows
        weight = None
        if self.weight is not None:
            weight = np.zeros(index.shape)
            weight[columns, slot] = self.weight[rows, taps]
        return AxisMap(self.index.shape[0], index, weight)


def broadcast_along(vector: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    """`vector` shaped to broadcast along `axis` of an array of `ndim` axes."""
    return vector.reshape(*(1,) * axis, -1, *(1,) * (ndim - axis - 1))


def apply_maps(maps: Sequence[AxisMap], x: jax.Array) -> jax.Array:
    """Apply each of `maps` to one of the last axes of `x`."""
    for axis, axis_map in enumerate(maps, x.ndim - len(maps)):
        x = axis_map.apply(x, axis)
    return x


def windows(extent: int, rows: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> AxisMap:
    """Pooling windows: row ``i`` reads `kernel` elements, `dilation` apart, from ``i * stride - padding`` on."""
    start = np.arange(rows)[:, None] * stride - padding
    return AxisMap(extent, start + np.arange(kernel) * dilation)


def adaptive_windows(extent: int, rows: int) -> AxisMap:
    """Adaptive pooling windows: row ``i`` of ``m`` reads ``floor(i n / m)`` up to ``ceil((i + 1) n / m)``."""
    i = np.arange(rows)
    start, end = i * extent // rows, -(-(i + 1) * extent // rows)
    index = start[:, None] + np.arange(int((end - start).max(initial=1)))
    return AxisMap(extent, np.where(index < end[:, None], index, -1))
