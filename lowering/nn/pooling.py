"""Max, average and adaptive pooling in two and three dimensions, with gradients (torch's 1-d forms call the 2-d ones).

Inputs are ``(N, C, *spatial)`` or ``(C, *spatial)``.  The number of windows is the extent of torch's result, so
``ceil_mode`` needs no separate formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.nn.axis_map import AxisMap, adaptive_windows, apply_maps, broadcast_along, windows
from xla_amp.lowering.operand import as_dtype, opmath, up
from xla_amp.lowering.registry import register

MAX_SUMMED_TAPS = 64
"""Taps of a window up to which the gradient of max pooling is a sum over taps; beyond, it is a scatter."""
_MAX_FUSED_TAPS = 16
"""Taps of a window up to which XLA:GPU finds the maximum and its position in one elementwise kernel."""
_MAX_HALF_ADDENDS = 4
"""Gradients per element up to which they are added in a half type: windows of 3 x 3 with stride 2 have 4."""


def _lowest(dtype: np.dtype) -> object:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf
    return jnp.iinfo(dtype).min


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


def _reduce_windows(x: jax.Array, maps: Sequence[AxisMap], initial: object, reduce: Callable[..., Any]) -> jax.Array:
    """`lax.reduce_window` over regular windows along the last axes."""
    lead = x.ndim - len(maps)
    strides, dilations = zip(*(axis_map.stride for axis_map in maps), strict=True)
    ones = (1,) * lead
    padding = [(0, 0)] * lead
    for axis, axis_map in enumerate(maps, lead):
        low, high = -int(axis_map.index[0, 0]), int(axis_map.index[-1, -1]) + 1 - axis_map.extent
        padding.append((low, max(high, 0)))
        x = lax.slice_in_dim(x, 0, axis_map.extent + min(high, 0), axis=axis)  # crop what no window reads
    result: jax.Array = lax.reduce_window(
        x,
        np.asarray(initial, x.dtype)[()],
        reduce,
        ones + tuple(axis_map.index.shape[1] for axis_map in maps),
        ones + strides,
        padding,
        window_dilation=ones + dilations,
    )
    return result


def _argmax(x: jax.Array, maps: Sequence[AxisMap]) -> jax.Array:
    """The flat spatial position of each window's maximum: the first of equal values, the last of several NaN.

    One axis after the other, innermost first: the order of torch's loop over the window.  XLA removes this code if the
    positions are unused.
    """
    position = jnp.zeros(x.shape, np.int32)
    inner = 1
    for axis, axis_map in reversed(list(enumerate(maps, x.ndim - len(maps)))):
        values = axis_map.taps(x, axis, _lowest(x.dtype))
        present = [broadcast_along(taps, axis, x.ndim) for taps in axis_map.present.T]
        offsets = [broadcast_along(taps, axis, x.ndim).astype(np.int32) for taps in axis_map.index.T * inner]
        inner_positions = axis_map.taps(position, axis, 0)
        positions = [
            jnp.where(exists, base + offset, np.int32(-1))  # -1: no position yet
            for exists, base, offset in zip(present, inner_positions, offsets, strict=True)
        ]
        best, best_position = values[0], positions[0]
        for value, candidate, exists in zip(values[1:], positions[1:], present[1:], strict=True):
            better = exists & ((best_position < 0) | (value > best) | (value != value))
            best, best_position = jnp.where(better, value, best), jnp.where(better, candidate, best_position)
        x, position, inner = best, best_position, inner * axis_map.extent
    return position


def _fused_maximum(x: jax.Array, maps: Sequence[AxisMap]) -> tuple[jax.Array, jax.Array]:
    """Each window's maximum and `_argmax`, as one elementwise function of all taps of a window.

    The number of the maximal tap is stored in one byte; its readers compute the position in `x` from it.
    """
    lead = x.ndim - len(maps)
    first: np.ndarray | int = 0
    taps_of_x: list[tuple[jax.Array, np.ndarray | bool]] = [(x, True)]
    for axis, axis_map in enumerate(maps, lead):
        first = first * axis_map.index.shape[1] + broadcast_along(axis_map.present.argmax(axis=1), axis, x.ndim)
        present_taps = [broadcast_along(present, axis, x.ndim) for present in axis_map.present.T]
        taps_of_x = [
            (value, exists & present)
            for part, exists in taps_of_x
            for value, present in zip(axis_map.taps(part, axis, _lowest(x.dtype)), present_taps, strict=True)
        ]
    best: Any = np.asarray(_lowest(x.dtype), x.dtype)
    best_tap: Any = np.asarray(first, np.int8)
    for tap, (value, exists) in enumerate(taps_of_x):
        better = exists & ((value > best) | (value != value))
        best, best_tap = jnp.where(better, value, best), jnp.where(better, np.int8(tap), best_tap)
    rest, taps = lax.optimization_barrier(best_tap).astype(np.int32), []
    for axis_map in reversed(maps):
        taps.append(rest % axis_map.index.shape[1])
        rest = rest // axis_map.index.shape[1]
    position: Any = 0
    for axis, (axis_map, tap) in enumerate(zip(maps, reversed(taps), strict=True), lead):
        _, dilation = axis_map.stride or (1, 1)  # one window's taps are always regular
        start = broadcast_along(axis_map.index[:, 0].astype(np.int32), axis, x.ndim)
        position = position * axis_map.extent + start + tap * dilation
    return best, position


def scatter_to_input(grad: jax.Array, x: jax.Array, indices: jax.Array, rank: int) -> jax.Array:
    """Zeros of the shape of `x`, with `grad` added at flat spatial `indices`."""
    planes, elements = math.prod(x.shape[:-rank]), math.prod(x.shape[-rank:])
    empty = jnp.zeros((planes, elements), opmath(grad.dtype))
    rows, flat = np.arange(planes)[:, None], (planes, math.prod(grad.shape[-rank:]))
    return empty.at[rows, indices.reshape(flat)].add(up(grad).reshape(flat)).reshape(x.shape)


def max_pool(
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
    if platform == "gpu" and x.size and math.prod(axis_map.index.shape[1] for axis_map in maps) <= _MAX_FUSED_TAPS:
        return _fused_maximum(x, maps)
    x = up(x)
    return _reduce_windows(x, maps, _lowest(x.dtype), lax.max), _argmax(x, maps)


def _select_and_scatter(grad: jax.Array, x: jax.Array, maps: Sequence[AxisMap]) -> jax.Array:
    """The gradient of max pooling as XLA's select-and-scatter, which finds the first maximum again.

    It is the only sum over windows for which XLA:TPU has a kernel; a sum over taps takes ten arrays as large as `x`.
    In a window with a NaN the gradient may go to another element than in torch.  Sums are in the operands' dtype, so
    beyond `_MAX_HALF_ADDENDS` the operands are converted to float32.
    """
    overlap = math.prod(-(-axis_map.index.shape[1] // axis_map.stride[0]) for axis_map in maps if axis_map.stride)
    if overlap > _MAX_HALF_ADDENDS:
        x, grad = up(x), up(grad)
    _, pullback = jax.vjp(lambda x: _reduce_windows(x, maps, _lowest(x.dtype), lax.max), x)
    grad_x: jax.Array = pullback(grad)[0]
    return grad_x


def max_pool_backward(
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
        return _select_and_scatter(grad, x, maps)
    if math.prod(kernel) > MAX_SUMMED_TAPS:
        return scatter_to_input(grad, x, indices, rank)
    grad = up(grad)
    total = jnp.zeros(x.shape, grad.dtype)
    for taps in np.ndindex(*kernel):
        position: np.ndarray | int = 0
        config = [(0, 0, 0)] * x.ndim
        for axis, (tap, axis_map) in enumerate(zip(taps, maps, strict=True), x.ndim - rank):
            index = axis_map.index[:, tap]
            position = position * axis_map.extent + broadcast_along(index, axis, x.ndim)
            step = int(index[1] - index[0]) if index.size > 1 else 1
            config[axis] = (int(index[0]), axis_map.extent - 1 - int(index[-1]), step - 1)
        total += lax.pad(jnp.where(indices == position, grad, 0), np.zeros((), grad.dtype), config)
    return total


def _divisor(
    maps: Sequence[AxisMap], padding: Sequence[int], count_include_pad: bool, divisor_override: int | None
) -> np.ndarray:
    """The divisor of each window's sum, shaped to broadcast along the spatial axes."""
    if divisor_override is not None:
        return np.full((1,) * len(maps), divisor_override)
    divisor = np.ones((1,) * len(maps), np.int64)
    for axis, (axis_map, amount) in enumerate(zip(maps, _spread(padding, len(maps)), strict=True)):
        # With `count_include_pad`, a window still ends at the end of the padded input.
        counted = axis_map.index < axis_map.extent + amount if count_include_pad else axis_map.present
        divisor = divisor * broadcast_along(counted.sum(axis=1), axis, len(maps))
    return divisor


def _divide(total: jax.Array, divisor: np.ndarray) -> jax.Array:
    # of integers rounded to zero, as C++ divides
    return jax.lax.div(*jnp.broadcast_arrays(total, as_dtype(divisor, total.dtype)))


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
    return _divide(
        _reduce_windows(up(x), maps, 0, lax.add), _divisor(maps, padding, count_include_pad, divisor_override)
    )


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
    grad = _divide(up(grad), _divisor(maps, padding, count_include_pad, divisor_override))
    return apply_maps([axis_map.transpose() for axis_map in maps], grad)


def _adaptive_maps(x: jax.Array, rows: Sequence[int]) -> list[AxisMap]:
    return [adaptive_windows(n, m) for n, m in zip(x.shape[-len(rows) :], rows, strict=True)]


@register("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(x: jax.Array, output_size: Sequence[int]) -> jax.Array:
    maps = _adaptive_maps(x, output_size)
    return _divide(apply_maps(maps, up(x)), _divisor(maps, (0,), False, None))


def _adaptive_avg_pool_backward(grad: jax.Array, x: jax.Array, *, rank: int) -> jax.Array:
    maps = _adaptive_maps(x, grad.shape[-rank:])
    grad = _divide(up(grad), _divisor(maps, (0,), False, None))
    return apply_maps([axis_map.transpose() for axis_map in maps], grad)


@register("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(x: jax.Array, output_size: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    maps = _adaptive_maps(x, output_size)
    y = x = up(x)
    for axis, axis_map in enumerate(maps, x.ndim - len(maps)):
        taps = axis_map.taps(y, axis, _lowest(x.dtype))
        y = taps[0]
        for tap in taps[1:]:
            y = jnp.maximum(y, tap)
    return y, _argmax(x, maps)


for _rank in (2, 3):
    for _name, _function in (
        (f"max_pool{_rank}d_with_indices", max_pool),
        (f"max_pool{_rank}d_with_indices_backward", max_pool_backward),
        (f"avg_pool{_rank}d", _avg_pool),
        (f"avg_pool{_rank}d_backward", _avg_pool_backward),
        (f"_adaptive_avg_pool{_rank}d_backward", _adaptive_avg_pool_backward),
        (f"adaptive_max_pool{_rank}d_backward", scatter_to_input),
    ):
        register(_name)(functools.partial(_function, rank=_rank))
