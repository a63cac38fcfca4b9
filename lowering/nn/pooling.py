"""Pooling: max, average and adaptive, with gradients, in two and three dimensions (torch's 1-d forms go through 2-d).

Inputs are ``(N, C, *spatial)`` or ``(C, *spatial)``.  Windows come from the shape of the result that torch promises, so
``ceil_mode`` needs no formula of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.nn import resampling  # noqa: F401  (interpolation shares this family's axis maps; fills the table)
from xla_amp.lowering.nn.axis_map import AxisMap, adaptive_windows, along, apply_maps, windows
from xla_amp.lowering.operand import as_dtype, opmath, up
from xla_amp.lowering.registry import register

_TAPS = 64
"""Places in a window up to which the gradient of max pooling is a sum over them, and no scatter."""

_AT_ONCE = 16
"""Places in a window up to which XLA:GPU takes the maximum and its position in one kernel that reads all of them."""
_FEW = 4
"""Gradients for one place that are added in a half type, as overlapping windows of 3 and stride 2 have them."""


def _lowest(dtype: np.dtype) -> object:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _spread(values: Sequence[int], rank: int) -> list[int]:
    return list(values) * rank if len(values) == 1 else list(values)


def _window_maps(
    spatial: Sequence[int],
    rows: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
) -> list[AxisMap]:
    rank = len(spatial)
    kernel = _spread(kernel, rank)
    stride = _spread(stride, rank) if len(stride) else kernel
    sizes = zip(spatial, rows, kernel, stride, _spread(padding, rank), _spread(dilation, rank), strict=True)
    return [windows(*size) for size in sizes]


def _reduced(x: jax.Array, maps: Sequence[AxisMap], initial: object, reduce: Callable[..., Any]) -> jax.Array:
    """`lax.reduce_window` over regular windows along the last axes."""
    lead = x.ndim - len(maps)
    strides, dilations = zip(*(axis_map.stride for axis_map in maps), strict=True)
    ones = (1,) * lead
    padding = [(0, 0)] * lead
    for axis, axis_map in enumerate(maps, lead):
        low, high = -int(axis_map.index[0, 0]), int(axis_map.index[-1, -1]) + 1 - axis_map.extent
        padding.append((low, max(high, 0)))
        x = lax.slice_in_dim(x, 0, axis_map.extent + min(high, 0), axis=axis)  # off with what no window sees
    return lax.reduce_window(
        x,
        np.asarray(initial, x.dtype)[()],
        reduce,
        ones + tuple(axis_map.index.shape[1] for axis_map in maps),
        ones + strides,
        padding,
        window_dilation=ones + dilations,
    )


def _first_maximum(x: jax.Array, maps: Sequence[AxisMap]) -> jax.Array:
    """The flat spatial position of each window's maximum: the first among equals, the last of several NaN.

    One axis after the other, innermost first, which gives the order of torch's loop over the window.  XLA drops all
    of it where no one reads the positions.
    """
    position = jnp.zeros(x.shape, np.int32)
    inner = 1
    for axis, axis_map in reversed(list(enumerate(maps, x.ndim - len(maps)))):
        values = axis_map.taps(x, axis, _lowest(x.dtype))
        present = [along(taps, axis, x.ndim) for taps in axis_map.present.T]
        offsets = [along(taps, axis, x.ndim).astype(np.int32) for taps in axis_map.index.T * inner]
        inside = axis_map.taps(position, axis, 0)
        places = [
            jnp.where(there, base + offset, np.int32(-1))  # -1: no place yet
            for there, base, offset in zip(present, inside, offsets, strict=True)
        ]
        best, found = values[0], places[0]
        for value, place, there in zip(values[1:], places[1:], present[1:], strict=True):
            better = there & ((found < 0) | (value > best) | (value != value))
            best, found = jnp.where(better, value, best), jnp.where(better, place, found)
        x, position, inner = best, found, inner * axis_map.extent
    return position


def _maximum_at_once(x: jax.Array, maps: Sequence[AxisMap]) -> tuple[jax.Array, jax.Array]:
    """Each window's maximum and `_first_maximum`, as one elementwise function of all the places in a window.

    The position is kept as a place in the window, in a byte, and what it is in `x` is computed where it is read.
    """
    lead = x.ndim - len(maps)
    first: np.ndarray | int = 0
    seen: list[tuple[jax.Array, np.ndarray | bool]] = [(x, True)]
    for axis, axis_map in enumerate(maps, lead):
        first = first * axis_map.index.shape[1] + along(axis_map.present.argmax(axis=1), axis, x.ndim)
        inside = [along(present, axis, x.ndim) for present in axis_map.present.T]
        seen = [
            (value, there & present)
            for part, there in seen
            for value, present in zip(axis_map.taps(part, axis, _lowest(x.dtype)), inside, strict=True)
        ]
    best: Any = np.asarray(_lowest(x.dtype), x.dtype)
    found: Any = np.asarray(first, np.int8)
    for tap, (value, there) in enumerate(seen):
        better = there & ((value > best) | (value != value))
        best, found = jnp.where(better, value, best), jnp.where(better, np.int8(tap), found)
    rest, taps = lax.optimization_barrier(found).astype(np.int32), []
    for axis_map in reversed(maps):
        taps.append(rest % axis_map.index.shape[1])
        rest = rest // axis_map.index.shape[1]
    position: Any = 0
    for axis, (axis_map, tap) in enumerate(zip(maps, reversed(taps), strict=True), lead):
        _, dilation = axis_map.stride or (1, 1)  # a window's places are regular
        start = along(axis_map.index[:, 0].astype(np.int32), axis, x.ndim)
        position = position * axis_map.extent + start + tap * dilation
    return best, position


def scattered(grad: jax.Array, x: jax.Array, indices: jax.Array, rank: int) -> jax.Array:
    """`grad` added up at flat spatial `indices` of an array shaped like `x`."""
    planes, places = math.prod(x.shape[:-rank]), math.prod(x.shape[-rank:])
    empty = jnp.zeros((planes, places), opmath(grad.dtype))
    rows = np.arange(planes)[:, None]
    return empty.at[rows, indices.reshape(planes, -1)].add(up(grad).reshape(planes, -1)).reshape(x.shape)


def _max_pool(
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    *,
    out: jax.ShapeDtypeStruct,
    platform: str,
    rank: int,
) -> tuple[jax.Array, jax.Array]:
    maps = _window_maps(x.shape[-rank:], out.shape[-rank:], kernel_size, stride, padding, dilation)
    if platform == "gpu" and x.size and math.prod(axis_map.index.shape[1] for axis_map in maps) <= _AT_ONCE:
        return _maximum_at_once(x, maps)
    x = up(x)
    return _reduced(x, maps, _lowest(x.dtype), lax.max), _first_maximum(x, maps)


@register("max_pool2d_with_indices")
def max_pool2d_with_indices(
    x: jax.Array, *window: Any, out: jax.ShapeDtypeStruct, platform: str
) -> tuple[jax.Array, jax.Array]:
    return _max_pool(x, *window, out=out, platform=platform, rank=2)


@register("max_pool3d_with_indices")
def max_pool3d_with_indices(
    x: jax.Array, *window: Any, out: jax.ShapeDtypeStruct, platform: str
) -> tuple[jax.Array, jax.Array]:
    return _max_pool(x, *window, out=out, platform=platform, rank=3)


def _selected(grad: jax.Array, x: jax.Array, maps: Sequence[AxisMap]) -> jax.Array:
    """The gradient of max pooling as XLA's select-and-scatter, which looks for the first maximum again.

    XLA:TPU has a kernel for it, and for nothing else that adds up windows: the sum over taps is ten arrays as large as
    `x`.  A gradient may reach another place of a window in which there is a NaN.  It adds up in the dtype of its
    operands, so more than a few gradients for one place are added in float32.
    """
    overlap = math.prod(-(-axis_map.index.shape[1] // axis_map.stride[0]) for axis_map in maps if axis_map.stride)
    if overlap > _FEW:
        x, grad = up(x), up(grad)
    _, pullback = jax.vjp(lambda x: _reduced(x, maps, _lowest(x.dtype), lax.max), x)
    return pullback(grad)[0]


def _max_pool_backward(
    grad: jax.Array,
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: jax.Array,
    *,
    platform: str,
    rank: int,
) -> jax.Array:
    maps = _window_maps(x.shape[-rank:], grad.shape[-rank:], kernel_size, stride, padding, dilation)
    kernel = [axis_map.index.shape[1] for axis_map in maps]
    if platform == "tpu" and x.size and set(dilation) == {1}:
        return _selected(grad, x, maps)
    if math.prod(kernel) > _TAPS:
        return scattered(grad, x, indices, rank)
    grad = up(grad)
    total = jnp.zeros(x.shape, grad.dtype)
    for taps in np.ndindex(*kernel):
        place: np.ndarray | int = 0
        config = [(0, 0, 0)] * x.ndim
        for axis, (tap, axis_map) in enumerate(zip(taps, maps, strict=True), x.ndim - rank):
            index = axis_map.index[:, tap]
            place = place * axis_map.extent + along(index, axis, x.ndim)
            step = int(index[1] - index[0]) if index.size > 1 else 1
            config[axis] = (int(index[0]), axis_map.extent - 1 - int(index[-1]), step - 1)
        total += lax.pad(jnp.where(indices == place, grad, 0), np.zeros((), grad.dtype), config)
    return total


@register("max_pool2d_with_indices_backward")
def max_pool2d_with_indices_backward(grad: jax.Array, x: jax.Array, *window: Any, platform: str) -> jax.Array:
    return _max_pool_backward(grad, x, *window, platform=platform, rank=2)


@register("max_pool3d_with_indices_backward")
def max_pool3d_with_indices_backward(grad: jax.Array, x: jax.Array, *window: Any, platform: str) -> jax.Array:
    return _max_pool_backward(grad, x, *window, platform=platform, rank=3)


def _divisor(
    maps: Sequence[AxisMap], padding: Sequence[int], count_include_pad: bool, divisor_override: int | None
) -> np.ndarray:
    """What each window's sum is divided by, shaped like the spatial axes."""
    if divisor_override is not None:
        return np.full((1,) * len(maps), divisor_override)
    divisor = np.ones((1,) * len(maps), np.int64)
    for axis, (axis_map, amount) in enumerate(zip(maps, _spread(padding, len(maps)), strict=True)):
        # with padding counted, a window still ends where the padded input does
        counted = axis_map.index < axis_map.extent + amount if count_include_pad else axis_map.present
        divisor = divisor * along(counted.sum(axis=1), axis, len(maps))
    return divisor


def _divided(total: jax.Array, divisor: np.ndarray) -> jax.Array:
    return total / as_dtype(divisor, total.dtype) if jnp.issubdtype(total.dtype, jnp.floating) else total // divisor


def _avg_pool(
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: jax.ShapeDtypeStruct,
    rank: int,
) -> jax.Array:
    maps = _window_maps(x.shape[-rank:], out.shape[-rank:], kernel_size, stride, padding)
    return _divided(_reduced(up(x), maps, 0, lax.add), _divisor(maps, padding, count_include_pad, divisor_override))


@register("avg_pool2d")
def avg_pool2d(x: jax.Array, *window: Any, out: jax.ShapeDtypeStruct) -> jax.Array:
    return _avg_pool(x, *window, out=out, rank=2)


@register("avg_pool3d")
def avg_pool3d(x: jax.Array, *window: Any, out: jax.ShapeDtypeStruct) -> jax.Array:
    return _avg_pool(x, *window, out=out, rank=3)


def _avg_pool_backward(
    grad: jax.Array,
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    rank: int,
) -> jax.Array:
    maps = _window_maps(x.shape[-rank:], grad.shape[-rank:], kernel_size, stride, padding)
    grad = _divided(up(grad), _divisor(maps, padding, count_include_pad, divisor_override))
    return apply_maps([axis_map.transpose() for axis_map in maps], grad)


@register("avg_pool2d_backward")
def avg_pool2d_backward(grad: jax.Array, x: jax.Array, *window: Any) -> jax.Array:
    return _avg_pool_backward(grad, x, *window, rank=2)


@register("avg_pool3d_backward")
def avg_pool3d_backward(grad: jax.Array, x: jax.Array, *window: Any) -> jax.Array:
    return _avg_pool_backward(grad, x, *window, rank=3)


def _adaptive_maps(x: jax.Array, rows: Sequence[int]) -> list[AxisMap]:
    return [adaptive_windows(n, m) for n, m in zip(x.shape[-len(rows) :], rows, strict=True)]


@register("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(x: jax.Array, output_size: Sequence[int]) -> jax.Array:
    maps = _adaptive_maps(x, output_size)
    return _divided(apply_maps(maps, up(x)), _divisor(maps, (0,), False, None))


def _adaptive_avg_pool_backward(grad: jax.Array, x: jax.Array, rank: int) -> jax.Array:
    maps = _adaptive_maps(x, grad.shape[-rank:])
    grad = _divided(up(grad), _divisor(maps, (0,), False, None))
    return apply_maps([axis_map.transpose() for axis_map in maps], grad)


@register("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    return _adaptive_avg_pool_backward(grad, x, 2)


@register("_adaptive_avg_pool3d_backward")
def adaptive_avg_pool3d_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    return _adaptive_avg_pool_backward(grad, x, 3)


@register("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(x: jax.Array, output_size: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    maps = _adaptive_maps(x, output_size)
    y = x = up(x)
    for axis, axis_map in enumerate(maps, x.ndim - len(maps)):
        taps = axis_map.taps(y, axis, _lowest(x.dtype))
        y = taps[0]
        for tap in taps[1:]:
            y = jnp.maximum(y, tap)
    return y, _first_maximum(x, maps)


@register("adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(grad: jax.Array, x: jax.Array, indices: jax.Array) -> jax.Array:
    return scattered(grad, x, indices, 2)


@register("adaptive_max_pool3d_backward")
def adaptive_max_pool3d_backward(grad: jax.Array, x: jax.Array, indices: jax.Array) -> jax.Array:
    return scattered(grad, x, indices, 3)


def _unpooled(x: jax.Array, indices: jax.Array, output_size: Sequence[int]) -> jax.Array:
    """`x` at flat spatial `indices` of zeros; of several values for one place any may stay, as in torch."""
    rank = len(output_size)
    planes = math.prod(x.shape[:-rank])
    empty = jnp.zeros((planes, math.prod(output_size)), x.dtype)
    placed = empty.at[np.arange(planes)[:, None], indices.reshape(planes, -1)].set(x.reshape(planes, -1))
    return placed.reshape(*x.shape[:-rank], *output_size)


@register("max_unpool2d")
def max_unpool2d(x: jax.Array, indices: jax.Array, output_size: Sequence[int]) -> jax.Array:
    return _unpooled(x, indices, output_size)


@register("max_unpool3d")
def max_unpool3d(
    x: jax.Array, indices: jax.Array, output_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> jax.Array:
    return _unpooled(x, indices, output_size)
