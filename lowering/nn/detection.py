"""torchvision's operators for object detection: `nms` and `roi_align`.

They become kernels of the device when torchvision defines the operators; nothing here imports it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.math.ordering import sort_stable
from xla_amp.lowering.registry import register


def _wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype that is computed in: float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, np.float32))


# -- non-maximum suppression ------------------------------------------------------------------------------------------


@register("torchvision::nms", lifted=("iou_threshold",))
def nms(dets: jax.Array, scores: jax.Array, iou_threshold: Any) -> jax.Array:
    """Indices of the boxes that are kept, by descending score, then -1: int64[N] (the engine removes these)."""
    _, order = sort_stable(scores, stable=True, dim=0, descending=True)
    boxes = _wide(dets)[order]
    limit = jnp.asarray(iou_threshold, np.float64)
    below = limit.astype(boxes.dtype)  # the greatest number of this dtype that is not above the threshold
    below = jnp.where(below.astype(np.float64) > limit, jnp.nextafter(below, -jnp.inf), below)
    left, top, right, bottom = boxes.T
    areas = (right - left) * (bottom - top)
    width = jnp.minimum(right[:, None], right) - jnp.maximum(left[:, None], left)
    height = jnp.minimum(bottom[:, None], bottom) - jnp.maximum(top[:, None], top)
    shared = jnp.maximum(width, 0) * jnp.maximum(height, 0)
    rank = jnp.arange(len(boxes))
    overlaps = (shared / (areas[:, None] + areas - shared) > below) & (rank[:, None] < rank)

    # A box is kept if no kept one before it overlaps it.  Each round decides at least one more box of a chain of
    # overlaps, so the rounds end at the result of the sequential algorithm; most images need a few.
    def is_unstable(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(state[0] != state[1])

    def decide(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state[1], ~jnp.any(overlaps & state[1][:, None], axis=0)

    everything = jnp.ones(len(boxes), bool)
    _, kept = jax.lax.while_loop(is_unstable, decide, (~everything, everything))
    place = jnp.where(kept, jnp.cumsum(kept) - 1, len(boxes))
    return jnp.full(len(boxes), -1, np.int64).at[place].set(order, mode="drop")


# -- average of bilinear samples in each bin of a region --------------------------------------------------------------


class _Axis(NamedTuple):
    """Samples along one axis of each region."""

    start: jax.Array
    """[K]"""
    size: jax.Array
    """[K] of a bin."""
    samples: jax.Array
    """[K] in a bin."""
    first: jax.Array
    """[K, bins] the first sample that is inside the image."""
    trips: Any
    """Samples to look at in any bin."""
    extent: int

    def corners(self, trip: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        """((index, weight) of the lower neighbour, of the upper one), each [K, bins], of one sample in each bin."""
        bins = self.first.shape[1]
        sample = self.first + trip
        step = self.size / jnp.maximum(self.samples, 1)
        position = self.start[:, None] + jnp.arange(bins) * self.size[:, None] + (sample + 0.5) * step[:, None]
        inside = (position >= -1) & (position <= self.extent) & (sample < self.samples[:, None])
        position = jnp.clip(jnp.where(inside, position, 0), 0, self.extent - 1)
        low = position.astype(np.int32)
        weight = position - low
        scale = inside / jnp.maximum(self.samples, 1)[:, None]
        high = jnp.minimum(low + 1, self.extent - 1)
        return (low, (1 - weight) * scale), (high, weight * scale)


def _axis(begin: jax.Array, end: jax.Array, bins: int, extent: int, ratio: int, aligned: bool) -> _Axis:
    length = end - begin
    if not aligned:
        length = jnp.maximum(length, 1)
    size = length / bins
    nothing = jnp.zeros((len(begin), bins), begin.dtype)
    if ratio > 0:
        return _Axis(begin, size, jnp.full_like(size, ratio), nothing, ratio, extent)
    # About one sample for each pixel.  Of a region that is larger than the image, those outside are left out.
    count = jnp.maximum(jnp.where(jnp.isfinite(size), jnp.ceil(size), 0), 0)
    step = size / jnp.maximum(count, 1)
    starts = begin[:, None] + jnp.arange(bins) * size[:, None]
    first = jnp.floor((-1 - starts) / jnp.where(step > 0, step, 1)[:, None]) - 1
    first = jnp.where(jnp.isfinite(first), jnp.maximum(first, 0), 0)
    trips = jnp.minimum(jnp.max(count, initial=0), 2 * extent + 8).astype(np.int32)  # a step is more than half a pixel
    return _Axis(begin, size, count, first, trips, extent)


def _regions(rois: jax.Array, shape: Any, scale: Any, bins: Any, ratio: int, aligned: bool) -> tuple[Any, _Axis, _Axis]:
    """(index of the image, rows, columns) of each region."""
    image, left, top, right, bottom = _wide(rois).T
    left, top, right, bottom = (edge * scale - (0.5 if aligned else 0) for edge in (left, top, right, bottom))
    rows = _axis(top, bottom, bins[0], shape[0], ratio, aligned)
    return image.astype(np.int32), rows, _axis(left, right, bins[1], shape[1], ratio, aligned)


def _over_samples(rows: _Axis, columns: _Axis, add: Any, result: jax.Array) -> jax.Array:
    """``result = add(result, row indices, column indices, weights)`` for each neighbour of each sample."""

    def sample(trip: Any, result: Any) -> Any:
        for row, row_weight in rows.corners(trip // columns.trips):
            for column, column_weight in columns.corners(trip % columns.trips):
                weights = row_weight[:, :, None] * column_weight[:, None, :]
                result = add(result, row[:, :, None], column[:, None, :], weights[..., None])
        return result

    summed: jax.Array = jax.lax.fori_loop(0, rows.trips * columns.trips, sample, result)
    return summed


@register("torchvision::roi_align")
def roi_align(
    input: jax.Array,
    rois: jax.Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> jax.Array:
    """[K, C, pooled_height, pooled_width] of input [N, C, H, W] and rois [K, 5]; computed in float32 at least."""
    bins = pooled_height, pooled_width
    image, rows, columns = _regions(rois, input.shape[2:], spatial_scale, bins, sampling_ratio, aligned)
    pixels = _wide(jnp.moveaxis(input, 1, -1))

    def add(result: jax.Array, row: jax.Array, column: jax.Array, weights: jax.Array) -> jax.Array:
        return result + weights.astype(pixels.dtype) * pixels[image[:, None, None], row, column]

    result = jnp.zeros((len(rois), *bins, input.shape[1]), pixels.dtype)
    if input.size and result.size:
        result = _over_samples(rows, columns, add, result)
    return jnp.moveaxis(result, -1, 1)


@register("torchvision::_roi_align_backward")
def roi_align_backward(
    grad: jax.Array,
    rois: jax.Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
    sampling_ratio: int,
    aligned: bool,
) -> jax.Array:
    """[batch_size, channels, height, width]: each sample's gradient goes to its neighbours."""
    bins = pooled_height, pooled_width
    image, rows, columns = _regions(rois, (height, width), spatial_scale, bins, sampling_ratio, aligned)
    gradients = _wide(jnp.moveaxis(grad, 1, -1))

    def add(result: jax.Array, row: jax.Array, column: jax.Array, weights: jax.Array) -> jax.Array:
        return result.at[image[:, None, None], row, column].add(weights.astype(result.dtype) * gradients)

    result = jnp.zeros((batch_size, height, width, channels), gradients.dtype)
    if result.size and grad.size:
        result = _over_samples(rows, columns, add, result)
    return jnp.moveaxis(result, -1, 1)
