"""Fractional max pooling: windows of one size at random positions, given as random samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.nn.pooling import scatter_to_input
from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register


def _starts(sample: jax.Array, extent: int, rows: int, window: int) -> jax.Array:
    """int32 [planes, rows]: the first element of each window along one axis; the last window ends with the input.

    Source: ``generate_intervals`` (ATen/native/FractionalMaxPooling.h).
    """
    sample = sample[:, None]
    if rows > 1:
        alpha = np.asarray(extent - window, sample.dtype) / np.asarray(rows - 1, sample.dtype)
        steps = np.arange(rows - 1, dtype=sample.dtype)
        starts = as_dtype((sample + steps) * alpha, np.int32) - as_dtype(sample * alpha, np.int32)
    else:
        starts = jnp.zeros((sample.shape[0], 0), np.int32)
    last = jnp.full((sample.shape[0], min(rows, 1)), extent - window, np.int32)
    return jnp.concatenate([starts, last], axis=1)


def _pool(
    x: jax.Array, window: Sequence[int], output_size: Sequence[int], samples: jax.Array, *, order: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Maxima and their flat positions; ``order[axis]`` is the number of the sample for `axis`."""
    rank = len(order)
    spatial, lead = x.shape[-rank:], x.shape[:-rank]
    planes = math.prod(lead)
    values = up(x).reshape(planes, math.prod(spatial))
    draws = up(as_dtype(samples, x.dtype)).reshape(-1, rank)[:planes]  # there may be samples of more rows
    position = jnp.zeros((planes,) + (1,) * (2 * rank), np.int32)
    for axis, extent in enumerate(spatial):
        rows = _starts(draws[:, order[axis]], extent, output_size[axis], window[axis])
        taps = rows[:, :, None] + np.arange(window[axis], dtype=np.int32)
        shape = [planes] + [1] * (2 * rank)
        shape[1 + axis], shape[1 + rank + axis] = output_size[axis], window[axis]
        position = position * extent + taps.reshape(shape)
    position = position.reshape(planes, math.prod(output_size), math.prod(window))
    flat = position.reshape(planes, math.prod(position.shape[1:]))
    taps_of_x = jnp.take_along_axis(values, flat, axis=1).reshape(position.shape)
    nan = jnp.isnan(taps_of_x)
    last_nan = taps_of_x.shape[-1] - 1 - jnp.argmax(nan[..., ::-1], axis=-1)
    best = jnp.where(nan.any(-1), last_nan, jnp.argmax(taps_of_x, axis=-1))[..., None]
    maxima, positions = (
        jnp.take_along_axis(a, best, axis=-1).reshape(*lead, *output_size) for a in (taps_of_x, position)
    )
    return maxima, positions


def _pool_backward(
    grad: jax.Array,
    x: jax.Array,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    indices: jax.Array,
    *,
    rank: int,
) -> jax.Array:
    return scatter_to_input(grad, x, indices, rank)


for _order in ((1, 0), (0, 1, 2)):  # the first sample of two is the width's
    _name = f"fractional_max_pool{len(_order)}d"
    register(_name)(functools.partial(_pool, order=_order))
    register(f"{_name}_backward")(functools.partial(_pool_backward, rank=len(_order)))
