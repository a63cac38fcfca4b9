"""Interpolation (``upsample_*``) and sampling at given positions (``grid_sampler_*``), with gradients.

Interpolation is an `AxisMap` for each spatial axis; its gradient applies the transposed maps.  Positions are computed
in torch's precision (float32, or float64 for float64 inputs): at position 1000 the two precisions differ by a visible
fraction of a pixel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.nn.axis_map import AxisMap, apply_maps
from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register

AxisRule = Callable[[int, int, float | None, bool, Any], AxisMap]
"""(input extent, output extent, scale factor, align_corners, NumPy float type of the positions) -> map."""


def _inverse_scale(extent: int, rows: int, scale: float | None, align: bool, real: Any) -> Any:
    """Input pixels per output pixel.  Source: ``area_pixel_compute_scale`` (ATen/native/UpSample.h)."""
    if align:
        return real(extent - 1) / real(rows - 1) if rows > 1 else real(0)
    return real(1.0 / scale) if scale is not None and scale > 0 else real(extent) / real(rows)


def _positions(extent: int, rows: int, scale: float | None, align: bool, real: Any) -> np.ndarray:
    factor = _inverse_scale(extent, rows, scale, align, real)
    pixels = np.arange(rows).astype(real)
    positions: np.ndarray = factor * pixels if align else factor * (pixels + real(0.5)) - real(0.5)
    return positions


def _nearest(extent: int, rows: int, scale: float | None, align: bool, real: Any) -> AxisMap:
    pixels = np.arange(rows)
    if rows == extent:
        index = pixels
    elif rows == 2 * extent:
        index = pixels // 2
    else:
        factor = _inverse_scale(extent, rows, scale, False, np.float32)
        index = np.minimum(np.floor(pixels.astype(np.float32) * factor).astype(np.int64), extent - 1)
    return AxisMap(extent, index[:, None])


def _nearest_exact(extent: int, rows: int, scale: float | None, align: bool, real: Any) -> AxisMap:
    factor = np.float64(_inverse_scale(extent, rows, scale, False, np.float32))
    index = np.floor(((np.arange(rows) + 0.5) * factor).astype(np.float32)).astype(np.int64)
    return AxisMap(extent, np.minimum(index, extent - 1)[:, None])


def _linear(extent: int, rows: int, scale: float | None, align: bool, real: Any) -> AxisMap:
    if rows == extent:
        return AxisMap(extent, np.arange(rows)[:, None])
    position = np.maximum(_positions(extent, rows, scale, align, real), 0)
    first = np.minimum(position.astype(np.int64), extent - 1)
    fraction = np.clip(position - first.astype(real), 0, 1)
    return AxisMap(
        extent,
        np.stack([first, np.minimum(first + 1, extent - 1)], axis=1),
        np.stack([1 - fraction, fraction], axis=1).astype(np.float64),
    )


def _cubic_weights(t: Any, sharpness: float, where: Any) -> Any:
    """Keys' cubic convolution kernel at distance `t`.  Source: R. Keys, IEEE Trans. ASSP 29 (1981)."""
    near = ((sharpness + 2) * t - (sharpness + 3)) * t * t + 1
    far = ((sharpness * t - 5 * sharpness) * t + 8 * sharpness) * t - 4 * sharpness
    return where(t < 1, near, where(t < 2, far, 0.0))


def _cubic(extent: int, rows: int, scale: float | None, align: bool, real: Any) -> AxisMap:
    position = _positions(extent, rows, scale, align, real)
    first = np.floor(position)
    fraction = np.clip(position - first, 0, 1)
    offsets = np.arange(-1, 3)
    weight = _cubic_weights(np.abs(fraction[:, None] - offsets), -0.75, np.where)
    return AxisMap(extent, np.clip(first.astype(np.int64)[:, None] + offsets, 0, extent - 1), weight.astype(np.float64))


def _antialiased(
    extent: int, rows: int, scale: float | None, align: bool, real: Any, *, reach: float, kernel: Callable[..., Any]
) -> AxisMap:
    """A filter as wide as an output pixel.  Source: ``HelperInterpBase`` (ATen/native/cpu/UpSampleKernel.cpp)."""
    factor = float(_inverse_scale(extent, rows, scale, align, real))
    widening = max(factor, 1.0)
    support = reach * widening
    center = factor * (np.arange(rows) + 0.5)
    start = np.maximum((center - support + 0.5).astype(np.int64), 0)
    end = np.minimum((center + support + 0.5).astype(np.int64), extent)
    index = start[:, None] + np.arange(max(1, int((end - start).max(initial=1))))
    weight = kernel(np.abs((index - center[:, None] + 0.5) / widening))
    weight = np.where(index < end[:, None], weight, 0.0)
    weight = weight / weight.sum(axis=1, keepdims=True)
    return AxisMap(extent, np.where(index < end[:, None], index, -1), weight)


def _triangle(t: np.ndarray) -> Any:
    return np.maximum(1 - t, 0.0)


def _sharp_cubic(t: np.ndarray) -> Any:
    return _cubic_weights(t, -0.5, np.where)


_RULES: dict[str, tuple[AxisRule, bool]] = {
    "_upsample_bicubic2d_aa": (functools.partial(_antialiased, reach=2.0, kernel=_sharp_cubic), True),
    "_upsample_bilinear2d_aa": (functools.partial(_antialiased, reach=1.0, kernel=_triangle), True),
    "_upsample_nearest_exact1d": (_nearest_exact, False),
    "_upsample_nearest_exact2d": (_nearest_exact, False),
    "_upsample_nearest_exact3d": (_nearest_exact, False),
    "upsample_bicubic2d": (_cubic, True),
    "upsample_bilinear2d": (_linear, True),
    "upsample_linear1d": (_linear, True),
    "upsample_nearest1d": (_nearest, False),
    "upsample_nearest2d": (_nearest, False),
    "upsample_nearest3d": (_nearest, False),
    "upsample_trilinear3d": (_linear, True),
}
"""Operation -> rule for one axis, and whether its schema has ``align_corners`` before the scale factors."""


def _maps(
    rule: AxisRule,
    takes_align: bool,
    spatial: Sequence[int],
    rows: Sequence[int],
    options: Sequence[Any],
    dtype: np.dtype,
) -> list[AxisMap]:
    align, scales = (options[0], options[1:]) if takes_align else (False, options)
    scales = tuple(scales) + (None,) * (len(rows) - len(scales))
    real = np.float64 if dtype == np.float64 else np.float32
    return [rule(n, m, scale, align, real) for n, m, scale in zip(spatial, rows, scales, strict=True)]


def _define(name: str, rule: AxisRule, takes_align: bool) -> None:
    @register(name)
    def forward(x: jax.Array, output_size: Sequence[int], *options: Any) -> jax.Array:
        maps = _maps(rule, takes_align, x.shape[2:], output_size, options, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating) or all(axis_map.weight is None for axis_map in maps):
            return apply_maps(maps, up(x))
        info = jnp.iinfo(x.dtype)
        return jnp.clip(jnp.round(apply_maps(maps, as_dtype(x, jnp.float32))), info.min, info.max)

    @register(f"{name}_backward")
    def backward(grad: jax.Array, output_size: Sequence[int], input_size: Sequence[int], *options: Any) -> jax.Array:
        maps = _maps(rule, takes_align, input_size[2:], output_size, options, grad.dtype)
        return apply_maps([axis_map.transpose() for axis_map in maps], up(grad))


for _name, (_rule, _takes_align) in _RULES.items():
    _define(_name, _rule, _takes_align)


# -- grid_sampler: the integer codes are those of ATen/native/GridSampler.h -------------------------------------------

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def _clip(position: jax.Array, extent: int) -> jax.Array:
    """`position` clipped to the image; the gradient is zero at the border and beyond."""
    return jnp.where(position <= 0, 0.0, jnp.where(position >= extent - 1, float(extent - 1), position))


def _reflect(position: jax.Array, low: float, span: float) -> jax.Array:
    if span == 0:
        return jnp.zeros_like(position)
    position = position - low
    position = jnp.where(position < 0, -position, position)
    flips = jnp.floor(position / span)
    rest = position - flips * span
    return low + jnp.where(flips % 2 == 0, rest, span - rest)


def _apply_padding_mode(position: jax.Array, extent: int, padding: int, align: bool) -> jax.Array:
    """`position`, in pixels, clipped or reflected into the image according to the padding mode."""
    if padding == _REFLECTION:
        position = _reflect(position, *((0.0, extent - 1.0) if align else (-0.5, float(extent))))
    return position if padding == _ZEROS else _clip(position, extent)


def _pixels(image: jax.Array, positions: Sequence[jax.Array]) -> jax.Array:
    """``image[n, :, *positions]``, 0 outside; `positions` are integer-valued, one array ``(N, ...)`` per spatial axis.

    Returns:
        ``(N, C, ...)``.
    """
    spatial = image.shape[2:]
    flat, present = jnp.zeros((), jnp.int32), jnp.ones((), bool)
    for position, extent in zip(positions, spatial, strict=True):
        present = present & (position >= 0) & (position < extent)
        flat = flat * extent + jnp.clip(position, 0, extent - 1).astype(jnp.int32)
    planes = image.reshape(*image.shape[:2], math.prod(spatial))
    values = jnp.take_along_axis(planes, flat.reshape(flat.shape[0], 1, -1), axis=2, mode="clip")
    values = values.reshape(*image.shape[:2], *flat.shape[1:])
    return jnp.where(present[:, None], values, jnp.zeros((), values.dtype))


def _axis_taps(position: jax.Array, extent: int, mode: int, padding: int, align: bool) -> tuple[jax.Array, jax.Array]:
    """The pixels ``(N, P, taps)`` that sampling at `position` ``(N, P)`` reads along one axis, and their weights."""
    if mode == _BICUBIC:
        base = jax.lax.stop_gradient(jnp.floor(position))[..., None]
        offsets = jnp.arange(-1, 3, dtype=position.dtype)
        pixels = jnp.round(_apply_padding_mode(base + offsets, extent, padding, align))
        return pixels, _cubic_weights(jnp.abs(position[..., None] - base - offsets), -0.75, jnp.where)
    position = _apply_padding_mode(position, extent, padding, align)
    if mode == _NEAREST:
        return jnp.round(position)[..., None], jnp.ones_like(position)[..., None]
    base = jax.lax.stop_gradient(jnp.floor(position))
    fraction = position - base
    return jnp.stack([base, base + 1], axis=-1), jnp.stack([1 - fraction, fraction], axis=-1)


def _sample(image: jax.Array, grid: jax.Array, mode: int, padding: int, align: bool) -> jax.Array:
    extents = image.shape[2:]
    rank = len(extents)
    points = grid.reshape(grid.shape[0], -1, rank)
    positions, weight = [], jnp.ones((), image.dtype)
    for axis, extent in enumerate(extents):
        position = points[..., rank - 1 - axis]  # the grid lists x first
        position = (position + 1) / 2 * (extent - 1) if align else ((position + 1) * extent - 1) / 2
        pixels, axis_weight = _axis_taps(position, extent, mode, padding, align)
        shape = (*position.shape, *(1,) * axis, -1, *(1,) * (rank - 1 - axis))
        positions.append(pixels.reshape(shape))
        weight = weight * axis_weight.reshape(shape)
    result = jnp.sum(_pixels(image, positions) * weight[:, None], axis=tuple(range(3, 3 + rank)))
    return result.reshape(*image.shape[:2], *grid.shape[1:-1])


@register("_grid_sampler_2d_cpu_fallback", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(
    image: jax.Array, grid: jax.Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    return _sample(up(image), up(grid), interpolation_mode, padding_mode, align_corners)


@register("_grid_sampler_2d_cpu_fallback_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    grad: jax.Array,
    image: jax.Array,
    grid: jax.Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool] = (True, True),
) -> tuple[jax.Array | None, jax.Array]:
    def sampled(image: jax.Array, grid: jax.Array) -> jax.Array:
        return _sample(image, grid, interpolation_mode, padding_mode, align_corners)

    grad_image, grad_grid = jax.vjp(sampled, up(image), up(grid))[1](up(grad))
    return grad_image if output_mask[0] else None, grad_grid
