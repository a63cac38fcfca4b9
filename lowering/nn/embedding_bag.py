"""Embedding bags: the sum, mean or maximum of a table's rows in each bag.

A bag is the part of `indices` from one offset to the next.  Entries equal to `padding_idx` are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ops import segment_sum

from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register
from xla_amp.lowering.tensor.scattering import embedding, embedding_dense_backward, narrow

_SUM, _MEAN, _MAX = 0, 1, 2
"""torch's mode codes (ATen/native/EmbeddingBag.h)."""


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
    outs: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(output, bag of each index, number of counted indices in each bag, table row of each maximum)."""
    bags = outs[0].shape[0]
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(indices.shape[0], dtype=offsets.dtype), side="right") - 1
    counted = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, jnp.bool_)
    size = segment_sum(as_dtype(counted, jnp.int64), bag, bags)
    rows = up(embedding(weight, indices))
    if mode == _MAX:
        result, max_indices = _maxima(rows, indices, bag, counted, size)
    else:
        rows = jnp.where(counted[:, None], rows, 0)
        rows = rows if per_sample_weights is None else rows * as_dtype(per_sample_weights, rows.dtype)[:, None]
        result, max_indices = segment_sum(rows, bag, bags), jnp.zeros(outs[3].shape, jnp.int64)
    if mode == _MEAN:
        result = result / as_dtype(jnp.maximum(size, 1), result.dtype)[:, None]
    return result, bag, jnp.pad(size, (0, outs[2].shape[0] - bags)), max_indices


def _maxima(
    rows: jax.Array, indices: jax.Array, bag: jax.Array, counted: jax.Array, size: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each bag's maximum per column, 0 for an empty bag; and the table row of its first occurrence."""
    rows = jnp.where(counted[:, None], rows, -jnp.inf)
    maximum = jax.ops.segment_max(rows, bag, size.shape[0])
    count = indices.shape[0]
    attained = (rows == maximum[bag]) & counted[:, None]
    first = jax.ops.segment_min(jnp.where(attained, jnp.arange(count)[:, None], count), bag, size.shape[0])
    max_indices = indices.at[jnp.minimum(first, max(count - 1, 0))].get(mode="promise_in_bounds")
    filled = size[:, None] > 0
    return jnp.where(filled, maximum, 0), jnp.where(filled, max_indices, 0)


@register("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    grad: jax.Array,
    indices: jax.Array,
    bag: jax.Array,
    size: jax.Array,
    max_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    """Gradient of the table; summed in float32 for halves."""
    grad = up(grad)
    table = jnp.zeros((num_weights, grad.shape[1]), grad.dtype)
    size = size[: grad.shape[0]]
    if mode == _MAX:
        columns = jnp.arange(grad.shape[1])
        grad = jnp.where(size[:, None] > 0, grad, 0)
        return table.at[narrow(max_indices, num_weights), columns].add(grad, mode="promise_in_bounds")
    if mode == _MEAN:
        grad = grad / as_dtype(jnp.maximum(size, 1), grad.dtype)[:, None]
    rows = grad[bag]
    if per_sample_weights is not None:
        rows = rows * as_dtype(per_sample_weights, rows.dtype)[:, None]
    return embedding_dense_backward(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


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
    """Gradient of `per_sample_weights`."""
    products = jnp.sum(up(grad)[bag] * up(embedding(weight, indices)), axis=-1)
    return jnp.where(indices == padding_idx, 0, products) if padding_idx >= 0 else products
