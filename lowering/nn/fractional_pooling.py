"""Fractional max pooling: windows of one size at random places, which the operation gets as random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.nn.pooling import scattered
from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register


def _starts(sample: jax.Array, extent: int, rows: int, window: int) -> jax.Array:
    """int [planes, rows]: where the windows along one axis begin; the last ends where the input does.

    Source: ``generate_intervals`` (ATen/native/FractionalMaxPooling.h).
    """
    sample = sample[:, None]
    if rows > 1:
        alpha = np.asarray(extent - window, sample.dtype) / np.asarray(rows - 1, sample.dtype)
        steps = np.arange(rows - 1, dtype=sample.dtype)
        found = as_dtype((sample + steps) * alpha, np.int32) - as_dtype(sample * alpha, np.int32)
    else:
        found = jnp.zeros((sample.shape[0], 0), np.int32)
    last = jnp.full((sample.shape[0], min(rows, 1)), extent - window, np.int32)
    return jnp.concatenate([found, last], axis=1)


def _pool(
    x: jax.Array, window: Sequence[int], output_size: Sequence[int], samples: jax.Array, order: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Maxima and their flat places; `order` says which sample of each plane belongs to which axis."""
    rank = len(order)
    spatial, lead = x.shape[-rank:], x.shape[:-rank]
    planes = math.prod(lead)
    values, draws = up(x).reshape(planes, math.prod(spatial)), up(as_dtype(samples, x.dtype)).reshape(planes, rank)
    place = jnp.zeros((planes,) + (1,) * (2 * rank), np.int32)
    for axis, extent in enumerate(spatial):
        rows = _starts(draws[:, order[axis]], extent, output_size[axis], window[axis])
        taps = rows[:, :, None] + np.arange(window[axis], dtype=np.int32)
        shape = [planes] + [1] * (2 * rank)
        shape[1 + axis], shape[1 + rank + axis] = output_size[axis], window[axis]
        place = place * extent + taps.reshape(shape)
    place = place.reshape(planes, math.prod(output_size), math.prod(window))
    seen = jnp.take_along_axis(values, place.reshape(planes, math.prod(place.shape[1:])), axis=1).reshape(place.shape)
    nan = jnp.isnan(seen)
    last_nan = seen.shape[-1] - 1 - jnp.argmax(nan[..., ::-1], axis=-1)
    best = jnp.where(nan.any(-1), last_nan, jnp.argmax(seen, axis=-1))[..., None]
    maxima, places = (jnp.take_along_axis(a, best, axis=-1).reshape(*lead, *output_size) for a in (seen, place))
    return maxima, places


@register("fractional_max_pool2d")
def fractional_max_pool2d(
    x: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _pool(x, kernel_size, output_size, random_samples, (1, 0))  # the first sample is the width's


@register("fractional_max_pool3d")
def fractional_max_pool3d(
    x: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _pool(x, kernel_size, output_size, random_samples, (0, 1, 2))


@register("fractional_max_pool2d_backward")
def fractional_max_pool2d_backward(
    grad: jax.Array, x: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], indices: jax.Array
) -> jax.Array:
    return scattered(grad, x, indices, 2)


@register("fractional_max_pool3d_backward")
def fractional_max_pool3d_backward(
    grad: jax.Array, x: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], indices: jax.Array
) -> jax.Array:
    return scattered(grad, x, indices, 3)
