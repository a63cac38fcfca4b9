"""Embedding bags: rows of a table summed, averaged or maximised bag by bag, without the rows in between.

A bag is a stretch of `indices` from one offset to the next.  Entries equal to `padding_idx` count for nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register
from xla_amp.lowering.tensor.scattering import narrow

_SUM, _MEAN, _MAX = 0, 1, 2
"""torch's numbers of the modes (ATen/native/EmbeddingBag.h)."""


def _rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    return table.at[narrow(indices, table.shape[0])].get(mode="promise_in_bounds")


def _per_bag(values: jax.Array, bag: jax.Array, bags: int) -> jax.Array:
    return jnp.zeros((bags, *values.shape[1:]), values.dtype).at[bag].add(values, mode="promise_in_bounds")


@register("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
    outs: tuple[Any, ...],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(bags, the bag of each index, the number of indices that count in each bag, the row behind each maximum)."""
    bags = outs[0].shape[0]
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(indices.shape[0], dtype=offsets.dtype), side="right") - 1
    counts = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, jnp.bool_)
    size = _per_bag(as_dtype(counts, jnp.int64), bag, bags)
    rows = up(_rows(weight, indices))
    if mode == _MAX:
        result, places = _maxima(rows, indices, bag, counts, size)
    else:
        rows = jnp.where(counts[:, None], rows, 0)
        rows = rows if per_sample_weights is None else rows * as_dtype(per_sample_weights, rows.dtype)[:, None]
        result, places = _per_bag(rows, bag, bags), jnp.zeros(outs[3].shape, jnp.int64)
    if mode == _MEAN:
        result = result / as_dtype(jnp.maximum(size, 1), result.dtype)[:, None]
    return result, bag, jnp.pad(size, (0, outs[2].shape[0] - bags)), places


def _maxima(
    rows: jax.Array, indices: jax.Array, bag: jax.Array, counts: jax.Array, size: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The greatest of each bag per column, 0 in an empty bag; and the table row of the first that has it."""
    shape = (size.shape[0], rows.shape[1])
    rows = jnp.where(counts[:, None], rows, -jnp.inf)
    greatest = jnp.full(shape, -jnp.inf, rows.dtype).at[bag].max(rows, mode="promise_in_bounds")
    count = indices.shape[0]
    attained = (rows == greatest[bag]) & counts[:, None]
    entry = jnp.where(attained, jnp.arange(count)[:, None], count)
    first = jnp.full(shape, count).at[bag].min(entry, mode="promise_in_bounds")
    places = indices.at[jnp.minimum(first, max(count - 1, 0))].get(mode="promise_in_bounds")
    filled = size[:, None] > 0
    return jnp.where(filled, greatest, 0), jnp.where(filled, places, 0)


@register("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    grad: jax.Array,
    indices: jax.Array,
    bag: jax.Array,
    size: jax.Array,
    places: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    """Gradient of the table; halves are summed in float32."""
    grad = up(grad)
    table = jnp.zeros((num_weights, grad.shape[1]), grad.dtype)
    size = size[: grad.shape[0]]
    if mode == _MAX:
        columns = jnp.arange(grad.shape[1])
        grad = jnp.where(size[:, None] > 0, grad, 0)
        return table.at[narrow(places, num_weights), columns].add(grad, mode="promise_in_bounds")
    if mode == _MEAN:
        grad = grad / as_dtype(jnp.maximum(size, 1), grad.dtype)[:, None]
    rows = grad[bag]
    if per_sample_weights is not None:
        rows = rows * as_dtype(per_sample_weights, rows.dtype)[:, None]
    if scale_grad_by_freq:
        rows = rows / _per_bag(jnp.ones(indices.shape, rows.dtype), indices, num_weights)[indices][:, None]
    if padding_idx >= 0:
        rows = jnp.where((indices == padding_idx)[:, None], 0, rows)
    return table.at[narrow(indices, num_weights)].add(rows, mode="promise_in_bounds")


@register("_embedding_bag_backward")
def embedding_bag_backward(
    grad: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    bag: jax.Array,
    size: jax.Array,
    places: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    """Gradient of the table; dense, also where a sparse one was asked for."""
    return embedding_bag_dense_backward(
        grad, indices, bag, size, places, num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx
    )


@register("_embedding_bag_per_sample_weights_backward")
def per_sample_weights_backward(
    grad: jax.Array,
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    bag: jax.Array,
    mode: int,
    padding_idx: int = -1,
) -> jax.Array:
    """Gradient of the weights of single entries."""
    products = jnp.sum(up(grad)[bag] * up(_rows(weight, indices)), axis=-1)
    return jnp.where(indices == padding_idx, 0, products) if padding_idx >= 0 else products
