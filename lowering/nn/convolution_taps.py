"""Convolution as a sum over the kernel's elements (taps), for the shapes where XLA:CPU's own is slow.

For each tap, the window of the padded input that it sees is multiplied with the tap's slice of the weight, and the
products are added up in float32.  How a product is formed is the `form`:

===============  ==============================================  =========================================
form             layout and product                              for
===============  ==============================================  =========================================
depthwise        ``(N, C, *)``, elementwise                      one channel and one filter in each group
channels_first   ``(C, N, *)``, dots with a leading group axis   grouped, and 1x1 (where no copy is made)
channels_last    ``(N, *, C)``, dots                             one group, many channels
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

Form = Literal["depthwise", "channels_first", "channels_last"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """What the three maps of a convolution share; one number per spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def spread(values: Sequence[int], rank: int) -> tuple[int, ...]:
        """`values` for `rank` axes; torch lets one number stand for all."""
        return tuple(values) * rank if len(values) == 1 else tuple(values)

    @classmethod
    def of(
        cls, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, rank: int
    ) -> Geometry:
        return cls(
            stride=cls.spread(stride, rank),
            padding=cls.spread(padding, rank),
            dilation=cls.spread(dilation, rank),
            groups=groups,
        )

    def extents(self, spatial: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Spatial extents of the result on an input of extents `spatial`."""
        sizes = zip(spatial, kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for n, k, stride, pad, dilation in sizes)


def _offsets(kernel: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, kernel))


def _arrange(x: jax.Array, form: Form) -> jax.Array:
    """`x` from ``(N, C, *)`` in the layout of `form`."""
    if form == "depthwise":
        return x
    return jnp.swapaxes(x, 0, 1) if form == "channels_first" else jnp.moveaxis(x, 1, -1)


def _restore(x: jax.Array, form: Form) -> jax.Array:
    if form == "depthwise":
        return x
    return jnp.swapaxes(x, 0, 1) if form == "channels_first" else jnp.moveaxis(x, -1, 1)


def _first_spatial(form: Form) -> int:
    return 1 if form == "channels_last" else 2


def _window(padded: jax.Array, tap: Sequence[int], extents: Sequence[int], geometry: Geometry, form: Form) -> jax.Array:
    """What `tap` sees of the padded input at every place of the result."""
    start, limit, step = [0] * padded.ndim, list(padded.shape), [1] * padded.ndim
    for axis, (t, n, stride, dilation) in enumerate(
        zip(tap, extents, geometry.stride, geometry.dilation, strict=True), _first_spatial(form)
    ):
        start[axis], step[axis] = t * dilation, stride
        limit[axis] = t * dilation + (n - 1) * stride + 1
    return lax.slice(padded, start, limit, step)


def _padded(x: jax.Array, geometry: Geometry, form: Form) -> jax.Array:
    width = [(0, 0)] * x.ndim
    for axis, amount in enumerate(geometry.padding, _first_spatial(form)):
        width[axis] = (amount, amount)
    return jnp.pad(x, width) if any(geometry.padding) else x


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """``(groups, C / groups, sites)`` from the channels-first layout, or from a tap's ``(O, C / groups)``."""
    return x.reshape(groups, x.shape[0] // groups, -1)


def _per_channel(tap_weight: jax.Array, rank: int) -> jax.Array:
    return up(tap_weight).reshape(-1, *(1,) * rank)


def forward(x: jax.Array, weight: jax.Array, geometry: Geometry, form: Form) -> jax.Array:
    """The convolution; float32 for half operands."""
    rank, groups = x.ndim - 2, geometry.groups
    extents = geometry.extents(x.shape[2:], weight.shape[2:])
    if form == "depthwise":
        x = up(x)
    padded = _padded(_arrange(x, form), geometry, form)

    def part(tap: tuple[int, ...]) -> jax.Array:
        window, tap_weight = _window(padded, tap, extents, geometry, form), weight[(..., *tap)]
        if form == "depthwise":
            return window * _per_channel(tap_weight, rank)
        if form == "channels_first":
            left, right = _grouped(tap_weight, groups), _grouped(window, groups)
            product = contract(left, right, ((2,), (1,)), ((0,), (0,)), platform="cpu")
            return product.reshape(weight.shape[0], *window.shape[1:])
        product = contract(window.reshape(-1, window.shape[-1]), tap_weight, ((1,), (1,)), platform="cpu")
        return product.reshape(*window.shape[:-1], weight.shape[0])

    return _restore(functools.reduce(operator.add, map(part, _offsets(weight.shape[2:]))), form)


def data_gradient(
    grad: jax.Array, weight: jax.Array, spatial: Sequence[int], geometry: Geometry, form: Form
) -> jax.Array:
    """The transpose of `forward` in its input, which has extents `spatial`; float32 for half operands."""
    rank, groups = grad.ndim - 2, geometry.groups
    channels = weight.shape[1] * groups
    if form == "depthwise" and all(stride == 1 for stride in geometry.stride):
        # a correlation with the flipped kernel: one fused loop, where adding shifted products makes one per tap
        kernel = weight.shape[2:]
        padding = tuple(d * (k - 1) - p for d, k, p in zip(geometry.dilation, kernel, geometry.padding, strict=True))
        if all(amount >= 0 for amount in padding):
            flipped = jnp.flip(weight, tuple(range(2, 2 + rank)))
            return forward(grad, flipped, dataclasses.replace(geometry, padding=padding), form)
    grad = _arrange(up(grad) if form == "depthwise" else grad, form)

    def part(tap: tuple[int, ...]) -> jax.Array:
        tap_weight = weight[(..., *tap)]
        if form == "depthwise":
            product = grad * _per_channel(tap_weight, rank)
        elif form == "channels_first":
            left, right = _grouped(tap_weight, groups), _grouped(grad, groups)
            product = contract(left, right, ((1,), (1,)), ((0,), (0,)), platform="cpu")
            product = product.reshape(channels, *grad.shape[1:])
        else:
            product = contract(grad.reshape(-1, grad.shape[-1]), tap_weight, ((1,), (0,)), platform="cpu")
            product = product.reshape(*grad.shape[:-1], channels)
        return _placed(product, tap, spatial, geometry, form)

    return _restore(functools.reduce(operator.add, map(part, _offsets(weight.shape[2:]))), form)


def _placed(part: jax.Array, tap: Sequence[int], spatial: Sequence[int], geometry: Geometry, form: Form) -> jax.Array:
    """The transpose of `_window` on the padded input, with the padding cut off."""
    config = [(0, 0, 0)] * part.ndim
    for axis, (t, n, stride, pad, dilation) in enumerate(
        zip(tap, spatial, geometry.stride, geometry.padding, geometry.dilation, strict=True), _first_spatial(form)
    ):
        low = t * dilation - pad
        config[axis] = (low, n - low - (part.shape[axis] - 1) * stride - 1, stride - 1)
    return lax.pad(part, np.zeros((), part.dtype), config)


def weight_gradient(
    grad: jax.Array, x: jax.Array, weight_shape: Sequence[int], geometry: Geometry, form: Form
) -> jax.Array:
    """The transpose of `forward` in its weight; float32 for half operands."""
    groups = geometry.groups
    filters, channels, *kernel = weight_shape
    extents = grad.shape[2:]
    if form == "depthwise":
        x, grad = up(x), up(grad)
    padded, grad = _padded(_arrange(x, form), geometry, form), _arrange(grad, form)
    parts = []
    for tap in _offsets(kernel):
        window = _window(padded, tap, extents, geometry, form)
        if form == "depthwise":
            # the outer spatial axes first: XLA:CPU vectorises that reduction, and not the one over all axes
            product = window * grad
            product = jnp.sum(product, axis=tuple(range(2, product.ndim - 1))) if product.ndim > 3 else product
            part = jnp.sum(product, axis=(0, 2))
        elif form == "channels_first":
            part = contract(
                _grouped(grad, groups), _grouped(window, groups), ((2,), (2,)), ((0,), (0,)), platform="cpu"
            )
        else:
            rows = grad.reshape(-1, filters)
            part = contract(rows, window.reshape(-1, channels), ((0,), (0,)), platform="cpu")
        parts.append(part.reshape(filters, channels))
    return jnp.stack(parts, axis=-1).reshape(filters, channels, *kernel).astype(opmath(x.dtype))
