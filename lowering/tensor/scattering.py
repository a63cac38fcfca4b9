"""Reading and writing elements at positions that are data: ``gather``, ``scatter``, ``index_put`` and others.

Halves are summed in float32.  If several plain writes have one target, any of them may win, as in torch.  A boolean
mask is not converted to positions: `masked_write` selects elements, so the number of true elements is not needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.math.reduction import vector_norm
from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register


def narrow(index: jax.Array, extent: int) -> jax.Array:
    """`index` in the narrowest of int32 and int64 that can address `extent` elements."""
    return as_dtype(index, jnp.int32 if extent < 2**31 else jnp.int64)


def along(axis: int, index: Any) -> tuple[Any, ...]:
    """The index tuple that applies `index` to one axis."""
    return (slice(None),) * axis + (index,)


def full_indices(x: jax.Array, indices: Sequence[jax.Array | None]) -> tuple[Any, ...]:
    """torch's list of index tensors (``None`` for a whole axis) as an index tuple."""
    return tuple(slice(None) if i is None else narrow(i, x.shape[axis]) for axis, i in enumerate(indices))


# -- reductions into elements -----------------------------------------------------------------------------------------


def _identity(mode: str, dtype: Any) -> Any:
    if mode in ("amax", "amin"):
        if np.dtype(dtype).kind in "iu":
            limits = jnp.iinfo(dtype)
            return limits.min if mode == "amax" else limits.max
        return (mode == "amin") if np.dtype(dtype) == np.bool_ else (-np.inf if mode == "amax" else np.inf)
    return 1 if mode in ("prod", "multiply") else 0


_WRITES = {"amax": "max", "amin": "min", "mean": "add", "prod": "multiply", "sum": "add"}
"""torch's name of a reduction -> that of the write to ``x.at[index]``, if it has another."""


def _combine(x: jax.Array, index: tuple[Any, ...], source: Any, mode: str, include_self: bool = True) -> jax.Array:
    """`x` with `source` combined into its elements at `index`; without `include_self` these start as the identity."""
    if mode == "set":
        return x.at[index].set(as_dtype(source, x.dtype), mode="promise_in_bounds")
    if x.dtype == np.bool_:  # a sum of booleans is true if one of them is
        return _combine(as_dtype(x, np.int32), index, as_dtype(source, np.int32), mode, include_self) != 0
    x, original = up(x), x.dtype
    source = as_dtype(source, x.dtype)
    if not include_self:
        touched = jnp.zeros(x.shape, jnp.bool_).at[index].set(True, mode="promise_in_bounds")
        x = jnp.where(touched, np.asarray(_identity(mode, x.dtype), x.dtype), x)
    result: jax.Array = getattr(x.at[index], _WRITES.get(mode, mode))(source, mode="promise_in_bounds")
    if mode == "mean":
        start = jnp.full(x.shape, 1 if include_self else 0, jnp.int32)
        count = as_dtype(jnp.maximum(start.at[index].add(1, mode="promise_in_bounds"), 1), x.dtype)
        result = result / count if np.dtype(original).kind not in "iub" else jnp.floor_divide(result, count)
    return result


# -- scatter: one position per element of `source`, along one axis ----------------------------------------------------


@register("scatter.reduce", "scatter.value_reduce", "scatter_reduce.two")
def scatter(x: jax.Array, dim: int, index: jax.Array, source: Any, reduce: str, include_self: bool = True) -> jax.Array:
    """`x` with elements of `source`, or a number, combined into those at positions along `dim`."""
    if x.ndim == 0:
        source = source.reshape(-1) if getattr(source, "ndim", 0) else source
        return scatter(x[None], 0, index.reshape(-1), source, reduce, include_self).reshape(())
    if index.ndim == 0:
        index = index[None]
    if getattr(source, "ndim", 0):  # a number is broadcast; a tensor may be larger than the index
        source = source[tuple(slice(extent) for extent in index.shape)]
    positions = [lax.broadcasted_iota(jnp.int32, index.shape, axis) for axis in range(x.ndim)]
    positions[dim % x.ndim] = narrow(index, x.shape[dim])
    return _combine(x, tuple(positions), source, reduce, include_self)


register("scatter.src", "scatter.value")(functools.partial(scatter, reduce="set"))
register("scatter_add")(functools.partial(scatter, reduce="sum"))


# -- index_*: one position per slice ----------------------------------------------------------------------------------


@register("index_reduce")
def index_reduce(
    x: jax.Array, dim: int, index: jax.Array, source: Any, reduce: str, *, include_self: bool = True
) -> jax.Array:
    """`x` with its slices at `index` combined with those of `source`, or with a number."""
    y = x.reshape(x.shape or (1,))
    axis = dim % y.ndim
    positions = narrow(index.reshape(-1), y.shape[axis])
    if getattr(source, "ndim", 0):
        source = source.reshape(*y.shape[:axis], positions.shape[0], *y.shape[axis + 1 :])
    return _combine(y, along(axis, positions), source, reduce, include_self).reshape(x.shape)


register("index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor")(functools.partial(index_reduce, reduce="set"))


@register("index_add")
def index_add(x: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, alpha: Any = 1) -> jax.Array:
    """`x` with ``alpha * source`` added to its slices at `index`."""
    source = up(source)
    return index_reduce(x, dim, index, source * as_dtype(alpha, source.dtype), "sum")


@register("put")
def put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    """`x` with elements written (or added) at positions in its flat order."""
    mode = "sum" if accumulate else "set"
    return _combine(x.reshape(-1), (narrow(index, x.size),), source.reshape(index.shape), mode).reshape(x.shape)


# -- masks ------------------------------------------------------------------------------------------------------------


def masked_write(x: jax.Array, mask: jax.Array, values: jax.Array) -> jax.Array:
    """`x` with the elements of its leading axes where `mask` is true replaced by the rows of `values`, in order.

    Args:
        mask: the shape of the first axes of `x`.
        values: (rows, ...) with the remaining axes; as many rows as the mask has true elements, or one for all.
    """
    if values.shape[0] == 0:
        return x
    row = jnp.cumsum(mask.reshape(-1), dtype=jnp.int32).reshape(mask.shape) - 1
    taken = values.at[jnp.clip(row, 0, values.shape[0] - 1)].get(mode="promise_in_bounds")
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), as_dtype(taken, x.dtype), x)


@register("masked_scatter")
def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """`x` with its elements where `mask` is true replaced by those of `source`, in order."""
    x, mask = jnp.broadcast_arrays(x, mask)
    return masked_write(x, mask, source.reshape(-1))


@register("masked_scatter_backward")
def masked_scatter_backward(grad: jax.Array, mask: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """The gradient of `masked_scatter`'s source: elements of `grad` where `mask` is true, in order, then zeros."""
    mask = jnp.broadcast_to(mask, grad.shape).reshape(-1)
    size = math.prod(sizes)
    row = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, size)
    return jnp.zeros((size,), grad.dtype).at[row].set(grad.reshape(-1), mode="drop").reshape(tuple(sizes))


# -- index_put: indices of several axes, and masks --------------------------------------------------------------------


@register("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(
    x: jax.Array,
    indices: Sequence[jax.Array | None],
    values: jax.Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> jax.Array:
    """``x[indices] = values``, or ``+=`` with `accumulate` (which, unlike Python's, sums repeated positions)."""
    given = [i for i in indices if i is not None]
    if not any(_is_mask(i) for i in given):
        return _combine(x, full_indices(x, indices), values, "sum" if accumulate else "set")
    if len(given) == 1:
        return _masked_put(x, indices, values, accumulate)
    wide = up(x)
    written = wide.at[_without_masks(x, indices, values)]
    values = as_dtype(values, wide.dtype)
    return written.add(values, mode="drop") if accumulate else written.set(values, mode="drop")


def _is_mask(index: jax.Array) -> bool:
    return index.dtype in (jnp.bool_, jnp.uint8)


def _masked_put(x: jax.Array, indices: Sequence[jax.Array | None], values: jax.Array, accumulate: bool) -> jax.Array:
    """`index_put` with one mask and whole axes: every element is written at most once, so this is a select."""
    first = next(axis for axis, i in enumerate(indices) if i is not None)
    mask = jnp.asarray(indices[first]) != 0
    front = jnp.moveaxis(x, range(first, first + mask.ndim), range(mask.ndim))
    lead, rest = front.shape[mask.ndim : mask.ndim + first], front.shape[mask.ndim + first :]
    # In torch the true elements are one axis between the axes before and after the mask; move it to the front.
    rows = values.shape[-1 - len(rest)] if values.ndim > len(rest) else 1
    values = jnp.broadcast_to(values, (*lead, rows, *rest))
    values = jnp.moveaxis(values, first, 0)
    if accumulate:
        zeros = jnp.zeros(front.shape, up(x).dtype)
        written = up(front) + masked_write(zeros, mask, values)
    else:
        written = masked_write(front, mask, values)
    return jnp.moveaxis(written, range(mask.ndim), range(first, first + mask.ndim))


def _without_masks(x: jax.Array, indices: Sequence[jax.Array | None], values: jax.Array) -> tuple[Any, ...]:
    """The index tuple with each mask replaced by the positions of its true elements.

    Their number is the length of the other indices or of the values.  If both are broadcast, all positions of the mask
    are kept, and those of false elements are out of bounds.
    """
    consumed = sum(1 if i is None or not _is_mask(i) else i.ndim for i in indices)
    hits = max((i.size for i in indices if i is not None and not _is_mask(i)), default=1)
    if hits == 1:
        given = [axis for axis, i in enumerate(indices) if i is not None]
        together = given == list(range(given[0], given[-1] + 1))
        nones = sum(i is None for i in indices)
        behind = x.ndim - consumed + nones - (given[0] if together else 0)  # not together: the new axis is first
        hits = values.shape[-1 - behind] if values.ndim > behind else 1
    index: list[Any] = []
    for i in indices:
        if i is None:
            index.append(slice(None))
        elif _is_mask(i):
            size = hits if hits > 1 else i.size
            index.extend(narrow(p, x.size) for p in jnp.nonzero(i, size=size, fill_value=x.size))
        else:
            index.append(i)
    return tuple(index)


# ---- reading by indices ----------------------------------------------------------------------------------------------


def _read(x: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    return x.at[index].get(mode="promise_in_bounds")


@register("index.Tensor", "_unsafe_index.Tensor")
def index(x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    """``x[indices]`` for integer indices (the engine expands masks, because their number of true elements is data)."""
    return _read(x, full_indices(x, indices))


@register("index_select")
def index_select(x: jax.Array, dim: int, positions: jax.Array) -> jax.Array:
    """The slices of `x` at `positions` along `dim`."""
    if x.ndim == 0:
        return x
    return _read(x, along(dim % x.ndim, narrow(positions.reshape(-1), x.shape[dim])))


@register("gather")
def gather(x: jax.Array, dim: int, positions: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    """``out[i][j][k] = x[positions[i][j][k]][j][k]`` for dim 0, and so on."""
    if not positions.size:
        return jnp.zeros(positions.shape, x.dtype)  # torch then allows any rank
    if x.ndim == 0 or positions.ndim == 0:
        return jnp.broadcast_to(x.reshape(-1)[0], positions.shape)
    dim %= x.ndim
    window = tuple(slice(None) if axis == dim else slice(extent) for axis, extent in enumerate(positions.shape))
    positions = narrow(positions, x.shape[dim])
    return jnp.take_along_axis(x[window], positions, dim, mode="promise_in_bounds")


@register("take")
def take(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Elements of `x` at positions in its flat order."""
    return _read(x.reshape(-1), (narrow(positions, x.size),))


@register("nonzero_static")
def nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    """(size, x.ndim): indices of the nonzero elements of `x`, truncated or filled to `size` rows."""
    if x.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=-1)


# -- embeddings -------------------------------------------------------------------------------------------------------


@register("embedding")
def embedding(
    weight: jax.Array, indices: jax.Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> jax.Array:
    """Rows of `weight` at `indices`."""
    return _read(weight, (narrow(indices, weight.shape[0]),))


@register("embedding_dense_backward")
def embedding_dense_backward(
    grad: jax.Array, indices: jax.Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> jax.Array:
    """Gradient of the embedding's weight: sums of `grad` by index, in float32 for halves; zero for the padding row."""
    width = grad.shape[-1]
    grad, indices = up(grad).reshape(-1, width), narrow(indices.reshape(-1), num_weights)
    if scale_grad_by_freq:
        count = jnp.zeros((num_weights,), grad.dtype).at[indices].add(1)
        grad = grad / count[indices][:, None]
    if padding_idx >= 0:
        grad = jnp.where((indices == padding_idx)[:, None], jnp.zeros((), grad.dtype), grad)
    return jnp.zeros((num_weights, width), grad.dtype).at[indices].add(grad, mode="promise_in_bounds")


@register("embedding_renorm_", mutates=("self",))
def embedding_renorm(weight: jax.Array, indices: jax.Array, max_norm: float, norm_type: float) -> jax.Array:
    """Scales the rows at `indices` whose norm is above `max_norm` down to it."""
    used = jnp.zeros((weight.shape[0], 1), jnp.bool_).at[narrow(indices.reshape(-1), weight.shape[0])].set(True)
    x = up(weight)
    size = vector_norm(x, norm_type, (1,), True)
    scaled = x * (max_norm / (size + 1e-7))  # 1e-7: torch's guard against 0 / 0
    return jnp.where(used & (size > max_norm), scaled, x)
