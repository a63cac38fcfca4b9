"""Convolution as a sum over the kernel's elements (taps), for shapes where XLA:CPU's convolution is slow.

For each tap, the part of the padded input that it reads is multiplied with the tap's slice of the weight, and the
products are added in float32.  The `Taps` is the way of computing a product:

===============  ==============================================  =========================================
form             layout and product                              used for
===============  ==============================================  =========================================
depthwise        ``(N, C, *)``, elementwise                      one channel and one filter in each group
channels_first   ``(C, N, *)``, dots with a leading group axis   grouped, and 1x1 (where no copy is made)
channels_last    ``(N, *, C)``, dots                             one group, many channels or few elements in each
===============  ==============================================  =========================================
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.linalg.contraction import contract
from xla_amp.lowering.operand import opmath, up

Taps = Literal["depthwise", "channels_first", "channels_last"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Stride, padding and dilation for each spatial axis, and the number of groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def per_axis(values: Sequence[int], rank: int) -> tuple[int, ...]:
        """`values` for `rank` axes; in torch a single number is for all axes."""
        return tuple(values) * rank if len(values) == 1 else tuple(values)

    @classmethod
    def from_torch(
        cls, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, rank: int
    ) -> Geometry:
        """A geometry of `rank` spatial axes from torch's arguments."""
        return cls(
            stride=cls.per_axis(stride, rank),
            padding=cls.per_axis(padding, rank),
            dilation=cls.per_axis(dilation, rank),
            groups=groups,
        )

    def extents(self, spatial: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Spatial extents of the result for an input with extents `spatial`."""
        sizes = zip(spatial, kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for n, k, stride, pad, dilation in sizes)


def _offsets(kernel: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, kernel))


def _to_layout(x: jax.Array, form: Taps) -> jax.Array:
    """`x`, of shape ``(N, C, *)``, in the layout of `form`."""
    if form == "depthwise":
        return x
    return jnp.swapaxes(x, 0, 1) if form == "channels_first" else jnp.moveaxis(x, 1, -1)


def _from_layout(x: jax.Array, form: Taps) -> jax.Array:
    """The inverse of `_to_layout`."""
    if form == "depthwise":
        return x
    return jnp.swapaxes(x, 0, 1) if form == "channels_first" else jnp.moveaxis(x, -1, 1)


def _first_spatial(form: Taps) -> int:
    return 1 if form == "channels_last" else 2


def _window(padded: jax.Array, tap: Sequence[int], extents: Sequence[int], geometry: Geometry, form: Taps) -> jax.Array:
    """The elements of the padded input that `tap` reads, one for each element of the result."""
    start, limit, step = [0] * padded.ndim, list(padded.shape), [1] * padded.ndim
    for axis, (t, n, stride, dilation) in enumerate(
        zip(tap, extents, geometry.stride, geometry.dilation, strict=True), _first_spatial(form)
    ):
        start[axis], step[axis] = t * dilation, stride
        limit[axis] = t * dilation + (n - 1) * stride + 1
    return lax.slice(padded, start, limit, step)


def _pad(x: jax.Array, geometry: Geometry, form: Taps) -> jax.Array:
    width = [(0, 0)] * x.ndim
    for axis, amount in enumerate(geometry.padding, _first_spatial(form)):
        width[axis] = (amount, amount)
    return jnp.pad(x, width) if any(geometry.padding) else x


def _split_groups(x: jax.Array, groups: int) -> jax.Array:
    """``(groups, C / groups, elements)`` from the channels-first layout, or from a tap's ``(O, C / groups)``."""
    return x.reshape(groups, x.shape[0] // groups, -1)


def _per_channel(tap_weight: jax.Array, rank: int) -> jax.Array:
    return up(tap_weight).reshape(-1, *(1,) * rank)


def forward(x: jax.Array, weight: jax.Array, geometry: Geometry, form: Taps) -> jax.Array:
    """The convolution; float32 for half operands."""
    rank, groups = x.ndim - 2, geometry.groups
    extents = geometry.extents(x.shape[2:], weight.shape[2:])
    if form == "depthwise":
        x = up(x)
    padded = _pad(_to_layout(x, form), geometry, form)

    def part(tap: tuple[int, ...]) -> jax.Array:
        window, tap_weight = _window(padded, tap, extents, geometry, form), weight[(..., *tap)]
        if form == "depthwise":
            return window * _per_channel(tap_weight, rank)
        if form == "channels_first":
            left, right = _split_groups(tap_weight, groups), _split_groups(window, groups)
            product = contract(left, right, ((2,), (1,)), ((0,), (0,)), platform="cpu")
            return product.reshape(weight.shape[0], *window.shape[1:])
        product = contract(window.reshape(-1, window.shape[-1]), tap_weight, ((1,), (1,)), platform="cpu")
        return product.reshape(*window.shape[:-1], weight.shape[0])

    return _from_layout(functools.reduce(operator.add, map(part, _offsets(weight.shape[2:]))), form)


def data_gradient(
    grad: jax.Array, weight: jax.Array, spatial: Sequence[int], geometry: Geometry, form: Taps
) -> jax.Array:
    """The transpose of `forward` in its input, which has spatial extents `spatial`; float32 for half operands."""
    rank, groups = grad.ndim - 2, geometry.groups
    channels = weight.shape[1] * groups
    if form == "depthwise" and all(stride == 1 for stride in geometry.stride):
        # A correlation with the flipped kernel is one fused loop; a sum of shifted products is one loop per tap.
        kernel = weight.shape[2:]
        padding = tuple(d * (k - 1) - p for d, k, p in zip(geometry.dilation, kernel, geometry.padding, strict=True))
        if all(amount >= 0 for amount in padding):
            flipped = jnp.flip(weight, tuple(range(2, 2 + rank)))
            return forward(grad, flipped, dataclasses.replace(geometry, padding=padding), form)
    grad = _to_layout(up(grad) if form == "depthwise" else grad, form)

    def part(tap: tuple[int, ...]) -> jax.Array:
        tap_weight = weight[(..., *tap)]
        if form == "depthwise":
            product = grad * _per_channel(tap_weight, rank)
        elif form == "channels_first":
            left, right = _split_groups(tap_weight, groups), _split_groups(grad, groups)
            product = contract(left, right, ((1,), (1,)), ((0,), (0,)), platform="cpu")
            product = product.reshape(channels, *grad.shape[1:])
        else:
            product = contract(grad.reshape(-1, grad.shape[-1]), tap_weight, ((1,), (0,)), platform="cpu")
            product = product.reshape(*grad.shape[:-1], channels)
        return _pad_window(product, tap, spatial, geometry, form)

    return _from_layout(functools.reduce(operator.add, map(part, _offsets(weight.shape[2:]))), form)


def _pad_window(
    part: jax.Array, tap: Sequence[int], spatial: Sequence[int], geometry: Geometry, form: Taps
) -> jax.Array:
    """The transpose of `_window`, with the padding of the input cropped."""
    config = [(0, 0, 0)] * part.ndim
    for axis, (t, n, stride, pad, dilation) in enumerate(
        zip(tap, spatial, geometry.stride, geometry.padding, geometry.dilation, strict=True), _first_spatial(form)
    ):
        low = t * dilation - pad
        config[axis] = (low, n - low - (part.shape[axis] - 1) * stride - 1, stride - 1)
    return lax.pad(part, np.zeros((), part.dtype), config)


def weight_gradient(
    grad: jax.Array, x: jax.Array, weight_shape: Sequence[int], geometry: Geometry, form: Taps
) -> jax.Array:
    """The transpose of `forward` in its weight; float32 for half operands."""
    groups = geometry.groups
    filters, channels, *kernel = weight_shape
    extents = grad.shape[2:]
    if form == "depthwise":
        x, grad = up(x), up(grad)
    padded, grad = _pad(_to_layout(x, form), geometry, form), _to_layout(grad, form)
    parts = []
    for tap in _offsets(kernel):
        window = _window(padded, tap, extents, geometry, form)
        if form == "depthwise":
            # Reduce the outer spatial axes first: XLA:CPU vectorizes that reduction, but not one over all axes.
            product = window * grad
            product = jnp.sum(product, axis=tuple(range(2, product.ndim - 1))) if product.ndim > 3 else product
            part = jnp.sum(product, axis=(0, 2))
        elif form == "channels_first":
            part = contract(
                _split_groups(grad, groups), _split_groups(window, groups), ((2,), (2,)), ((0,), (0,)), platform="cpu"
            )
        else:
            rows = grad.reshape(-1, filters)
            part = contract(rows, window.reshape(-1, channels), ((0,), (0,)), platform="cpu")
        parts.append(part.reshape(filters, channels))
    # Taps between filters and channels, so that rows of channels are copied: with taps last, one element at a time.
    whole = jnp.moveaxis(jnp.stack(parts, axis=1), 1, -1)
    return whole.reshape(filters, channels, *kernel).astype(opmath(x.dtype))
