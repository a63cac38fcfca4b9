"""Convolution in one to three dimensions, plain and transposed, and its gradients.

A convolution is three linear maps that share one `Geometry`: `forward`, `data_gradient` (its transpose in the input)
and `weight_gradient` (its transpose in the weight).  A transposed convolution is the same three with input and result
exchanged.  Layout is torch's: ``(N, C, *spatial)`` and ``(O, C / groups, *kernel)``.

On GPU and TPU each map is XLA's convolution on the unconverted operands.  On CPU it runs in float32 on the rounded
operands (XLA:CPU has no faster kernel for half types), unless `_cpu_form` selects a sum over taps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.linalg.contraction import precision
from xla_amp.lowering.nn import convolution_taps as taps
from xla_amp.lowering.nn.convolution_taps import Geometry
from xla_amp.lowering.operand import up
from xla_amp.lowering.registry import register

Form = Literal["xla", "depthwise", "channels_first", "channels_last"]

_MIN_DOT_CHANNELS = 256
"""Channels from which one bfloat16 dot per tap is faster than XLA:CPU's float32 convolution."""


def _cpu_form(dtype: object, weight_shape: Sequence[int], groups: int) -> Form:
    """The fastest form of a convolution on XLA:CPU; docs/lowering.md has the measurements."""
    filters, channels, *kernel = weight_shape
    if groups > 1 and channels == 1 and filters == groups:
        return "depthwise"
    if groups > 1 or math.prod(kernel) == 1:
        return "channels_first"
    if dtype == jnp.bfloat16 and min(filters, channels) >= _MIN_DOT_CHANNELS:
        return "channels_last"
    return "xla"


def _form(dtype: object, weight_shape: Sequence[int], geometry: Geometry, platform: str) -> Form:
    return _cpu_form(dtype, weight_shape, geometry.groups) if platform == "cpu" else "xla"


def _xla_convolution(x: jax.Array, weight: jax.Array, geometry: Geometry) -> jax.Array:
    spatial = "DHW"[-len(geometry.stride) :]
    return lax.conv_general_dilated(
        x,
        weight,
        window_strides=geometry.stride,
        padding=[(amount, amount) for amount in geometry.padding],
        rhs_dilation=geometry.dilation,
        feature_group_count=geometry.groups,
        dimension_numbers=("NC" + spatial, "OI" + spatial, "NC" + spatial),
        precision=precision(x.dtype),
    )


def _operands(platform: str, *arrays: jax.Array) -> list[jax.Array]:
    return [up(x) for x in arrays] if platform == "cpu" else list(arrays)


def forward(x: jax.Array, weight: jax.Array, geometry: Geometry, platform: str) -> jax.Array:
    """The convolution of `x` with `weight`."""
    form = _form(x.dtype, weight.shape, geometry, platform)
    if form == "xla":
        x, weight = _operands(platform, x, weight)
        return _xla_convolution(x, weight, geometry)
    return taps.forward(x, weight, geometry, form)


def data_gradient(
    grad: jax.Array, weight: jax.Array, spatial: Sequence[int], geometry: Geometry, platform: str
) -> jax.Array:
    """The gradient of an input with spatial extents `spatial`, or the transposed convolution of `grad` to them."""
    form = _form(grad.dtype, weight.shape, geometry, platform)
    if form != "xla":
        return taps.data_gradient(grad, weight, spatial, geometry, form)
    grad, weight = _operands(platform, grad, weight)
    shape = (grad.shape[0], weight.shape[1] * geometry.groups, *spatial)
    x = jax.ShapeDtypeStruct(shape, grad.dtype)
    grad_x: jax.Array = jax.linear_transpose(lambda x: _xla_convolution(x, weight, geometry), x)(grad)[0]
    return grad_x


def weight_gradient(
    grad: jax.Array, x: jax.Array, weight_shape: Sequence[int], geometry: Geometry, platform: str
) -> jax.Array:
    """The gradient of a weight of shape `weight_shape`."""
    form = _form(x.dtype, weight_shape, geometry, platform)
    if form != "xla":
        return taps.weight_gradient(grad, x, weight_shape, geometry, form)
    grad, x = _operands(platform, grad, x)
    weight = jax.ShapeDtypeStruct(tuple(weight_shape), x.dtype)
    transpose = jax.linear_transpose(lambda weight: _xla_convolution(x, weight, geometry), weight)
    grad_weight: jax.Array = transpose(grad)[0]
    return grad_weight


def _transposed_extents(x: jax.Array, weight: jax.Array, extra: Sequence[int], geometry: Geometry) -> list[int]:
    """Spatial extents of a transposed convolution's result; `extra` is torch's ``output_padding``."""
    sizes = zip(
        x.shape[2:],
        weight.shape[2:],
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        Geometry.per_axis(extra, x.ndim - 2),
        strict=True,
    )
    return [(n - 1) * stride - 2 * pad + dilation * (k - 1) + 1 + out for n, k, stride, pad, dilation, out in sizes]


def _pad_to_result(x: jax.Array, weight: jax.Array, extents: Sequence[int], geometry: Geometry) -> jax.Array:
    """Pad `x` with zeros to the extents of the result of a convolution on `extents`.

    `x` is smaller if ``output_padding`` is at least the stride, which torch allows with dilation.
    """
    rows = geometry.extents(extents, weight.shape[2:])
    return jnp.pad(x, [(0, 0), (0, 0), *((0, n - m) for n, m in zip(rows, x.shape[2:], strict=True))])


# XLA:TPU's convolutions read filters along the lanes and channels along the sublanes.  In another layout, a weight and
# its momentum are each copied twice per step: 7 % of the bytes of ResNet-50, 64 images on a v5p (libtpu 0.0.42).
_WEIGHT_LAYOUT = MappingProxyType({"tpu": MappingProxyType({"weight": (1, 0)})})


@register("convolution", "convolution_overrideable", minor=_WEIGHT_LAYOUT)
def convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    platform: str,
) -> jax.Array:
    geometry = Geometry.from_torch(stride, padding, dilation, groups, x.ndim - 2)
    if transposed:
        extents = _transposed_extents(x, weight, output_padding, geometry)
        y = data_gradient(_pad_to_result(x, weight, extents, geometry), weight, extents, geometry, platform)
    else:
        y = forward(x, weight, geometry, platform)
    return y if bias is None else up(y) + up(bias).reshape(-1, *(1,) * (x.ndim - 2))


def _gradients(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    geometry: Geometry,
    transposed: bool,
    mask: Sequence[bool],
    platform: str,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    grad_x = grad_weight = grad_bias = None
    if mask[2]:
        grad_bias = jnp.sum(up(grad), axis=(0, *range(2, grad.ndim)))
    if mask[0]:
        if transposed:
            grad_x = forward(grad, weight, geometry, platform)[(..., *map(slice, x.shape[2:]))]
        else:
            grad_x = data_gradient(grad, weight, x.shape[2:], geometry, platform)
    if mask[1]:
        result, source = (_pad_to_result(x, weight, grad.shape[2:], geometry), grad) if transposed else (grad, x)
        grad_weight = weight_gradient(result, source, weight.shape, geometry, platform)
    return grad_x, grad_weight, grad_bias


@register("convolution_backward", minor=_WEIGHT_LAYOUT)
def convolution_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    *,
    platform: str,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    geometry = Geometry.from_torch(stride, padding, dilation, groups, x.ndim - 2)
    return _gradients(grad, x, weight, geometry, transposed, output_mask, platform)


@register("convolution_backward_overrideable", minor=_WEIGHT_LAYOUT)
def convolution_backward_overrideable(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    *,
    platform: str,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    geometry = Geometry.from_torch(stride, padding, dilation, groups, x.ndim - 2)
    return _gradients(grad, x, weight, geometry, transposed, output_mask, platform)
