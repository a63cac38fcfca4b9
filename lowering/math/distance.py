"""Distances between the rows of one or two sets of points, in any Minkowski norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.registry import register

_DIRECT = 25
"""torch's limit: with more rows than this on a side, Euclidean distances come from a matrix product."""
_NEVER = 2
"""`compute_mode` "donot_use_mm_for_euclid_dist"; 1 is "use_mm_for_euclid_dist", 0 and ``None`` go by `_DIRECT`."""


def _norm(difference: jax.Array, p: float) -> jax.Array:
    """The p-norm over the last axis."""
    size = jnp.abs(difference)
    if p == 0:
        return jnp.sum(size != 0, -1).astype(difference.dtype)
    if p == np.inf:
        return jnp.max(size, -1, initial=0)
    if p == 1:
        return jnp.sum(size, -1)
    if p == 2:
        return jnp.sqrt(jnp.sum(size * size, -1))
    return jnp.sum(size**p, -1) ** (1 / p)


def _slope(difference: jax.Array, distance: jax.Array, grad: jax.Array, p: float) -> jax.Array:
    """grad times the derivative of `distance` by each component; 0 where the distance is 0, as in torch."""
    size, sign = jnp.abs(difference), jnp.sign(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return grad * sign
    if p == np.inf:
        return grad * sign * (size == distance)
    safe = jnp.where(distance == 0, 1, distance)
    if p == 2:
        return jnp.where(distance == 0, 0, grad * difference / safe)
    ratio = jnp.where(size == 0, 0, jnp.where(size == 0, 1, size) ** (p - 1))
    return jnp.where(distance == 0, 0, grad * sign * ratio / safe ** (p - 1))


@register("_euclidean_dist")
def euclidean(x: jax.Array, y: jax.Array) -> jax.Array:
    """sqrt(|x|^2 + |y|^2 - 2 x y) as one product, so that sums are ordered as in torch."""

    def square(z: jax.Array) -> jax.Array:
        return jnp.sum(z * z, -1, keepdims=True)

    left = jnp.concatenate([-2 * x, square(x), jnp.ones_like(x[..., :1])], -1)
    right = jnp.concatenate([y, jnp.ones_like(y[..., :1]), square(y)], -1)
    product = jnp.matmul(left, jnp.swapaxes(right, -1, -2), precision=lax.Precision.HIGHEST)
    return jnp.sqrt(jnp.maximum(product, 0))


@register("_cdist_forward")
def cdist(x: jax.Array, y: jax.Array, p: float, compute_mode: int | None) -> jax.Array:
    """[..., rows of x, rows of y]."""
    large = x.shape[-2] > _DIRECT or y.shape[-2] > _DIRECT
    if p == 2 and (compute_mode == 1 or (large and compute_mode != _NEVER)):
        return euclidean(x, y)
    return _norm(x[..., :, None, :] - y[..., None, :, :], p)


@register("_cdist_backward")
def cdist_backward(
    grad: jax.Array, x: jax.Array, y: jax.Array, p: float, distance: jax.Array, *, out: jax.ShapeDtypeStruct
) -> jax.Array:
    """The gradient of x, with the batch dimensions of both; zeros if there are no distances."""
    if not distance.size:
        return jnp.zeros(out.shape, x.dtype)
    difference = x[..., :, None, :] - y[..., None, :, :]
    return jnp.sum(_slope(difference, distance[..., None], grad[..., None], p), -2)


@register("_pdist_forward")
def pdist(x: jax.Array, p: float = 2) -> jax.Array:
    """The distances of all pairs of rows i < j, in the order of the upper triangle."""
    i, j = np.triu_indices(x.shape[0], 1)
    return _norm(x[i] - x[j], p)


@register("_pdist_backward")
def pdist_backward(grad: jax.Array, x: jax.Array, p: float, distance: jax.Array) -> jax.Array:
    i, j = np.triu_indices(x.shape[0], 1)
    slope = _slope(x[i] - x[j], distance[:, None], grad[:, None], p)
    return jnp.zeros_like(x).at[i].add(slope).at[j].add(-slope)
