"""Read and write a strided window of a contiguous buffer with XLA's operations.

torch describes a view by sizes, strides and an offset into its storage; XLA has reshape, slice, transpose and
broadcast.  Every view that PyTorch's own view operations can make from a contiguous tensor factors into those four; the
rest (overlapping windows, strides that do not divide each other) becomes a gather or scatter over element indices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.operand import Permuted


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Window:
    """A strided window as a slice of the buffer reshaped to `factors`, outermost first."""

    padded: int
    """Elements of the flat buffer after padding it to a whole number of the outermost stride."""
    factors: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    order: tuple[int, ...]
    """View dimension of each factor; a last factor for the rest inside the innermost stride has none."""


def _contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def factored(size: int, shape: Sequence[int], strides: Sequence[int], offset: int) -> _Window | None:
    """The window as one slice, or ``None`` when strides overlap or do not divide each other."""
    dims = sorted(
        (
            (stride, extent, dim)
            for dim, (extent, stride) in enumerate(zip(shape, strides, strict=True))
            if extent > 1 and stride > 0
        ),
        key=lambda item: -item[0],
    )
    factors, start, stop = [], [], []
    rest, outer = offset, None
    for stride, extent, _ in dims:
        if outer is None:
            room = math.ceil(size / stride)
        elif outer % stride:
            return None
        else:
            room = outer // stride
        first, rest = divmod(rest, stride)
        if first + extent > room:
            return None
        factors.append(room)
        start.append(first)
        stop.append(first + extent)
        outer = stride
    inner = outer if outer is not None else size
    padded = factors[0] * dims[0][0] if dims else size
    if inner > 1 or not dims:
        factors.append(inner)
        start.append(rest)
        stop.append(rest + 1)
    return _Window(
        padded=padded,
        factors=tuple(factors),
        start=tuple(start),
        stop=tuple(stop),
        order=tuple(dim for _, _, dim in dims),
    )


def _indices(shape: Sequence[int], strides: Sequence[int], offset: int) -> np.ndarray:
    index = np.full(tuple(shape), offset, np.int64)
    for dim, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        index += (np.arange(extent) * stride).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return index


def _flat(base: jax.Array, padded: int) -> jax.Array:
    flat = base.reshape(-1)
    return jnp.pad(flat, (0, padded - flat.size)) if padded != flat.size else flat


def starts(size: int, shape: Sequence[int], strides: Sequence[int], offset: int) -> tuple[int, ...]:
    """The first indices of a window that is one slice and not the whole buffer, otherwise ().

    Windows that differ in their offset only differ in these; `read` and `write` take others as data.
    """
    if math.prod(shape) in (0, size):
        return ()
    window = factored(size, shape, strides, offset)
    return () if window is None else window.start


def _corner(window: _Window, begin: Sequence[jax.Array] | None) -> list[Any]:
    """Index of the window's first element in each factor; only those of factors that are cut can differ."""
    if begin is None:
        return list(window.start)
    extents = zip(window.factors, window.start, window.stop, begin, strict=True)
    return [at.astype(np.int32) if last - first != extent else 0 for extent, first, last, at in extents]


def _sliced(flat: jax.Array, window: _Window, begin: Sequence[jax.Array] | None) -> jax.Array:
    """The window's elements, sliced along axes as coarse as possible.

    The factors after the last sliced one are merged into it: heads are sliced from a projection before its last axis is
    split into heads, which saves a copy into the split axes' layout on a TPU.
    """
    extents = zip(window.factors, window.start, window.stop, strict=True)
    cut = [index for index, (extent, start, stop) in enumerate(extents) if stop - start != extent]
    last = cut[-1] if cut else len(window.factors) - 1
    unit = math.prod(window.factors[last + 1 :])
    x = flat.reshape(*window.factors[:last], window.factors[last] * unit)
    start, stop = ((*corner[:last], corner[last] * unit) for corner in (window.start, window.stop))
    if begin is None:
        return lax.slice(x, start, stop)
    corner = _corner(window, begin)
    index = [np.int32(at) if isinstance(at, int) else at for at in (*corner[:last], corner[last] * np.int32(unit))]
    return lax.dynamic_slice(x, index, [b - a for a, b in zip(start, stop, strict=True)])


def read(
    base: jax.Array,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    begin: Sequence[jax.Array] | None = None,
) -> jax.Array | Permuted:
    """The window of `base` (any shape, row-major) with these sizes, strides and offset, all in elements.

    A window that is a pure transpose is returned as `Permuted`, which contractions fold.  `begin` are `starts` as data
    for the window of another offset.
    """
    shape = tuple(shape)
    count = math.prod(shape)
    if count == 0:
        return jnp.zeros(shape, base.dtype)
    if offset == 0 and count == base.size and _contiguous(shape, strides):
        return base.reshape(shape)
    window = factored(base.size, shape, strides, offset)
    if window is None:
        return base.reshape(-1)[_indices(shape, strides, offset)]
    x = _sliced(_flat(base, window.padded), window, begin).reshape([shape[dim] for dim in window.order])
    # x has the window's non-trivial dimensions by descending stride; permute them to the view's order.
    permutation = tuple(window.order.index(dim) for dim in sorted(window.order))
    broadcast = any(extent > 1 and stride == 0 for extent, stride in zip(shape, strides, strict=True))
    if permutation == tuple(range(len(permutation))):
        sizes = zip(shape, strides, strict=True)
        x = x.reshape([extent if stride > 0 or extent == 1 else 1 for extent, stride in sizes])
        return jnp.broadcast_to(x, shape) if broadcast else x
    if not broadcast:
        return _with_unit_dims(x, permutation, shape, window.order)
    x = lax.transpose(x, permutation)
    x = x.reshape([extent if dim in window.order else 1 for dim, extent in enumerate(shape)])
    return jnp.broadcast_to(x, shape)


def _with_unit_dims(
    x: jax.Array, permutation: tuple[int, ...], shape: tuple[int, ...], order: Sequence[int]
) -> Permuted:
    """`x` transposed to the view; the view's dimensions of size one are in front of the base."""
    units = [dim for dim in range(len(shape)) if dim not in order]
    base = x.reshape((1,) * len(units) + x.shape)
    axis_of = {dim: position for position, dim in enumerate(units)}
    axis_of |= {dim: len(units) + permutation[rank] for rank, dim in enumerate(sorted(order))}
    return Permuted(base, tuple(axis_of[dim] for dim in range(len(shape))))


def write(
    base: jax.Array,
    new: jax.Array,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    begin: Sequence[jax.Array] | None = None,
) -> jax.Array:
    """`base` with its strided window replaced by `new` (of `shape`); the same shape and dtype as `base`.

    `begin` are `starts` as data for the window of another offset.
    """
    shape = tuple(shape)
    if math.prod(shape) == 0:
        return base
    if offset == 0 and math.prod(shape) == base.size and _contiguous(shape, strides):
        return new.reshape(base.shape)
    window = factored(base.size, shape, strides, offset)
    if window is None or any(extent > 1 and stride == 0 for extent, stride in zip(shape, strides, strict=True)):
        flat = base.reshape(-1).at[_indices(shape, strides, offset).reshape(-1)].set(new.reshape(-1))
        return flat.reshape(base.shape)
    x = _flat(base, window.padded).reshape(window.factors)
    ranks = sorted(window.order)
    y = new.reshape([shape[dim] for dim in ranks])
    y = lax.transpose(y, tuple(ranks.index(dim) for dim in window.order))
    y = y.reshape([stop - start for start, stop in zip(window.start, window.stop, strict=True)])
    corner = [np.int32(at) if isinstance(at, int) else at for at in _corner(window, begin)]
    x = y if y.shape == x.shape else lax.dynamic_update_slice(x, y, corner)
    return x.reshape(-1)[: base.size].reshape(base.shape)


# ---- windows of another dtype ----------------------------------------------------------------------------------------


def read_as(
    value: Any, shape: tuple[int, ...], strides: Sequence[int], offset: int, dtype: np.dtype, starts: Any = None
) -> Any:
    """The elements of a window.

    Args:
        value: of the whole buffer, of any shape and dtype.
        shape: of the window.
        strides: of the window, in elements of `dtype`.
        offset: of its first element, likewise.
        dtype: of the window; the buffer's bits are read as this dtype (`torch.Tensor.view`).
        starts: `starts` as data of the program, instead of `offset`.
    """
    return read(retype(value, dtype), shape, strides, offset, starts)  # maybe a `Permuted`


def retype(x: Any, dtype: np.dtype) -> Any:
    """The bits of `x` as `dtype`, flat if it has another dtype."""
    if x.dtype == dtype:
        return x
    if x.dtype.kind == "c" or dtype.kind == "c":
        return _retype_complex(x, dtype)
    x = x.reshape(-1)
    if x.dtype.itemsize < dtype.itemsize:
        x = x.reshape(-1, dtype.itemsize // x.dtype.itemsize)
    x = x.astype(np.uint8) if x.dtype == np.bool_ else x
    if dtype == np.bool_:
        return jax.lax.bitcast_convert_type(x, np.uint8).reshape(-1) != 0
    return jax.lax.bitcast_convert_type(x, dtype).reshape(-1)


def _retype_complex(x: Any, dtype: np.dtype) -> Any:
    if x.dtype.kind == "c":
        pairs = jax.numpy.stack([x.real, x.imag], axis=-1).reshape(-1)
        return retype(pairs, dtype)
    part = np.dtype(np.float32 if dtype == np.complex64 else np.float64)
    pairs = retype(x, part).reshape(-1, 2)
    return jax.lax.complex(pairs[:, 0], pairs[:, 1])
