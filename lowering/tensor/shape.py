"""Operations that move elements without computing: concatenation, flips, triangles, slice scatters, padding.

Views are not operations here: PyTorch makes them, and the engine reads them as strided windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register
from xla_amp.lowering.tensor import strided

# -- joining and repeating --------------------------------------------------------------------------------------------


@register("cat")
def cat(tensors: list[jax.Array], dim: int = 0, *, out: Any) -> jax.Array:
    """The tensors joined along `dim`; empty 1-d tensors are skipped, as in torch."""
    parts = [as_dtype(x, out.dtype) for x in tensors if x.shape != (0,)]
    return jnp.concatenate(parts, axis=dim) if parts else jnp.zeros(out.shape, out.dtype)


@register("stack", "_stack")
def stack(tensors: list[jax.Array], dim: int = 0, *, out: Any) -> jax.Array:
    """The tensors along a new axis."""
    return jnp.stack([as_dtype(x, out.dtype) for x in tensors], axis=dim)


@register("repeat")
def repeat(x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    """The tensor repeated `repeats` times along each axis (new axes in front)."""
    return jnp.tile(x, tuple(repeats))


# -- flips and rotations ----------------------------------------------------------------------------------------------


@register("flip")
def flip(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """`x` reversed along `dims`."""
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@register("roll", dynamic=("shifts",))
def roll(x: jax.Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> jax.Array:
    """Elements shifted cyclically along `dims`; in flat order if there are none."""
    if not dims:
        return jnp.roll(x.reshape(-1), shifts[0], 0).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = jnp.roll(x, shift, dim)
    return x


# -- triangles and diagonals ------------------------------------------------------------------------------------------


def _column_less_row(x: jax.Array) -> jax.Array:
    """Which diagonal each element of the matrices is on."""
    rows, columns = x.shape[-2:]
    return lax.broadcasted_iota(jnp.int32, (rows, columns), 1) - lax.broadcasted_iota(jnp.int32, (rows, columns), 0)


def _diagonal(x: jax.Array, diagonal: Any) -> Any:
    """`diagonal` in 32 bits: beyond the matrix all are alike."""
    rows, columns = x.shape[-2:]
    if isinstance(diagonal, int):
        return min(max(diagonal, -rows - 1), columns + 1)
    return jnp.clip(diagonal, -rows - 1, columns + 1).astype(jnp.int32)


@register("tril", dynamic=("diagonal",))
def tril(x: jax.Array, diagonal: Any = 0) -> jax.Array:
    """Matrices with zeros above a diagonal."""
    return jnp.where(_column_less_row(x) <= _diagonal(x, diagonal), x, jnp.zeros((), x.dtype))


@register("triu", dynamic=("diagonal",))
def triu(x: jax.Array, diagonal: Any = 0) -> jax.Array:
    """Matrices with zeros below a diagonal."""
    return jnp.where(_column_less_row(x) >= _diagonal(x, diagonal), x, jnp.zeros((), x.dtype))


@register("diagonal_scatter")
def diagonal_scatter(x: jax.Array, source: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """`x` with a diagonal replaced by `source`, whose last axis runs along it."""
    y = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    index = lax.iota(jnp.int32, source.shape[-1])
    y = y.at[..., index + max(-offset, 0), index + max(offset, 0)].set(as_dtype(source, x.dtype))
    return jnp.moveaxis(y, (-2, -1), (dim1, dim2))


# -- writing slices.  How many elements there are is known from the source: only the first index is data --------------


def _first(size: int, start: Any) -> Any:
    """The first index of a slice that starts at `start`, clamped as torch and Python do."""
    if start is None or isinstance(start, int):
        return slice(start, None).indices(size)[0]
    return jnp.clip(jnp.where(start < 0, start + size, start), 0, size).astype(jnp.int32)


def _place(x: jax.Array, source: jax.Array, axis: int, first: Any, step: int) -> jax.Array:
    """`x` with the slice of ``source.shape[axis]`` elements from `first` on replaced."""
    if not source.size:
        return x
    if step == 1:
        return lax.dynamic_update_slice_in_dim(x, source, first, axis)
    count = source.shape[axis]
    index: Any = slice(first, first + (count - 1) * step + 1, step)
    if not isinstance(first, int):
        index = first + step * lax.iota(jnp.int32, count)
    return x.at[(slice(None),) * axis + (index,)].set(source)


@register("slice_backward", dynamic=("start", "end"))
def slice_backward(grad: jax.Array, input_sizes: Sequence[int], dim: int, start: Any, end: Any, step: int) -> jax.Array:
    """The gradient at the elements of a slice, zeros elsewhere."""
    axis = dim % len(input_sizes)
    count, size = grad.shape[axis], input_sizes[axis]
    if count == 0:
        return jnp.zeros(tuple(input_sizes), grad.dtype)
    first = _first(size, start)
    if not isinstance(first, int):
        return _place(jnp.zeros(tuple(input_sizes), grad.dtype), grad, axis, first, step)
    edges = [(0, 0, 0)] * grad.ndim
    edges[axis] = (first, size - (first + (count - 1) * step + 1), step - 1)
    return lax.pad(grad, jnp.zeros((), grad.dtype), edges)


@register("select_backward", dynamic=("index",))
def select_backward(grad: jax.Array, input_sizes: Sequence[int], dim: int, index: Any) -> jax.Array:
    """The gradient at one index of `dim`, zeros elsewhere."""
    axis = dim % len(input_sizes)
    return slice_backward(jnp.expand_dims(grad, axis), input_sizes, axis, index, None, 1)


@register("slice_scatter", dynamic=("start", "end"))
def slice_scatter(
    x: jax.Array, source: jax.Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> jax.Array:
    """`x` with a slice along `dim` replaced."""
    axis = dim % x.ndim
    return _place(x, as_dtype(source, x.dtype), axis, _first(x.shape[axis], start), step)


@register("select_scatter", dynamic=("index",))
def select_scatter(x: jax.Array, source: jax.Array, dim: int, index: Any) -> jax.Array:
    """`x` with one index of `dim` replaced."""
    axis = dim % x.ndim
    return slice_scatter(x, jnp.expand_dims(source, axis), axis, index)


@register("as_strided_scatter")
def as_strided_scatter(
    x: jax.Array, source: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> jax.Array:
    """`x` with a strided window of its elements replaced."""
    return strided.write(x, as_dtype(source, x.dtype), size, stride, storage_offset or 0)


# -- blocks of images; columns come back by the transpose of the linear map that takes them ---------------------------


def _columns(
    x: jax.Array, kernel: Sequence[int], dilation: Sequence[int], pad: Sequence[int], stride: Sequence[int]
) -> jax.Array:
    """(N, C, H, W) -> (N, C kh kw, blocks)."""
    batch, channels = x.shape[:2]
    x = jnp.pad(x, [(0, 0), (0, 0), (pad[0], pad[0]), (pad[1], pad[1])])
    blocks = [(x.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)]
    taps = []
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            first = (row * dilation[0], column * dilation[1])
            last = [first[i] + (blocks[i] - 1) * stride[i] + 1 for i in range(2)]
            taps.append(lax.slice(x, (0, 0, *first), (batch, channels, *last), (1, 1, *stride)))
    return jnp.stack(taps, axis=2).reshape(batch, channels * math.prod(kernel), math.prod(blocks))


@register("im2col")
def im2col(
    x: jax.Array, kernel_size: Sequence[int], dilation: Sequence[int], pad: Sequence[int], stride: Sequence[int]
) -> jax.Array:
    """Sliding blocks of images as columns: (N, C, H, W) or (C, H, W) -> (N, C kh kw, blocks)."""
    columns = _columns(x.reshape(-1, *x.shape[-3:]), kernel_size, dilation, pad, stride)
    return columns.reshape(*x.shape[:-3], *columns.shape[1:])


@register("col2im")
def col2im(
    x: jax.Array,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    pad: Sequence[int],
    stride: Sequence[int],
) -> jax.Array:
    """Columns back into images, summed where blocks overlap; halves in float32."""
    columns = up(x).reshape(-1, *x.shape[-2:])
    channels = columns.shape[1] // math.prod(kernel_size)
    image = jax.ShapeDtypeStruct((columns.shape[0], channels, *output_size), columns.dtype)
    transposed = jax.linear_transpose(lambda y: _columns(y, kernel_size, dilation, pad, stride), image)
    images: jax.Array = transposed(columns)[0]
    return images.reshape(*x.shape[:-2], channels, *output_size)


# ---- padding ---------------------------------------------------------------------------------------------------------


def _widths(amounts: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    """(before, after) per axis, first axis first."""
    pairs = [(amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


@register("constant_pad_nd", dynamic=("pad",))
def constant_pad(x: jax.Array, pad: Sequence[Any], value: Any = 0, *, out: Any) -> jax.Array:
    """Pad with `value`."""
    if not all(isinstance(width, int) for width in pad):
        return _pad_by_data(x, [before for before, _ in _widths(pad, x.ndim)], as_dtype(value, x.dtype), out.shape)
    edges = [(before, after, 0) for before, after in _widths(pad, x.ndim)]
    return lax.pad(x, as_dtype(value, x.dtype), edges)


def _pad_by_data(x: jax.Array, before: Sequence[Any], value: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x` padded to `shape`, with widths in front of it that are data."""
    for axis, (width, size) in enumerate(zip(before, shape, strict=True)):
        if isinstance(width, int) and size == x.shape[axis]:
            continue
        index = lax.iota(jnp.int32, size) - as_dtype(width, jnp.int32)
        inside = ((index >= 0) & (index < x.shape[axis])).reshape([-1 if d == axis else 1 for d in range(x.ndim)])
        x = jnp.where(inside, jnp.take(x, index, axis, mode="clip"), value)
    return x


def _pad(x: jax.Array, amounts: Sequence[int], mode: Literal["reflect", "edge"]) -> jax.Array:
    widths = _widths(amounts, x.ndim)
    x = jnp.pad(x, [(max(before, 0), max(after, 0)) for before, after in widths], mode=mode)
    start = [max(-before, 0) for before, _ in widths]
    stop = [size - max(-after, 0) for (_, after), size in zip(widths, x.shape, strict=True)]
    return lax.slice(x, start, stop)


def _register_padding(name: str, mode: Literal["reflect", "edge"]) -> None:
    def forward(x: jax.Array, padding: Sequence[int]) -> jax.Array:
        return _pad(x, padding, mode)

    def backward(grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
        grad = up(grad)  # sum the gradients of an element's copies in float32 for halves
        operand = jax.ShapeDtypeStruct(x.shape, grad.dtype)
        grad_x: jax.Array = jax.linear_transpose(lambda y: _pad(y, padding, mode), operand)(grad)[0]
        return grad_x

    for rank in (1, 2, 3):
        register(f"{name}_pad{rank}d")(forward)
        register(f"{name}_pad{rank}d_backward")(backward)


_register_padding("reflection", "reflect")
_register_padding("replication", "edge")
