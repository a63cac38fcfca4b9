"""Reading elements at positions that are data: embeddings, gathers, indexing with tensors.

Positions are not checked: where torch raises on the CPU and aborts on a GPU, XLA reads the nearest element.  They are
narrowed to 32 bits where the indexed axis allows it, because TPUs emulate 64-bit integers.  Writing is in `scattering`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xla_amp.lowering.math.reduction import vector_norm
from xla_amp.lowering.operand import up
from xla_amp.lowering.registry import register
from xla_amp.lowering.tensor import scattering  # noqa: F401  (registers its lowerings)
from xla_amp.lowering.tensor.scattering import along, full_indices, narrow


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
