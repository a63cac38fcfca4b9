"""Convolution in one to three dimensions, plain and transposed, and its gradients.

A convolution is three linear maps that share one `Geometry`: `forward`, `data_gradient` (its transpose in the input)
and `weight_gradient` (its transpose in the weight).  A transposed convolution is the same three with input and result
exchanged.  Layout is torch's: ``(N, C, *spatial)`` and ``(O, C / groups, *kernel)``.

On GPU and TPU each map is XLA's own convolution on the operands as they are.  On CPU the map runs in float32 on the
rounded operands (XLA has no faster kernel for the half types there), unless `_cpu_form` knows a faster form.
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

_WIDE = 256
"""Channels from which one bfloat16 dot per kernel element beats XLA:CPU's float32 convolution."""


def _cpu_form(dtype: object, weight_shape: Sequence[int], groups: int) -> Form:
    """The fastest form of a convolution on XLA:CPU; the figures are in docs/lowering.md."""
    filters, channels, *kernel = weight_shape
    if groups > 1 and channels == 1 and filters == groups:
        return "depthwise"
    if groups > 1 or math.prod(kernel) == 1:
        return "channels_first"
    if dtype == jnp.bfloat16 and min(filters, channels) >= _WIDE:
        return "channels_last"
    return "xla"


def _form(dtype: object, weight_shape: Sequence[int], geometry: Geometry, platform: str) -> Form:
    return _cpu_form(dtype, weight_shape, geometry.groups) if platform == "cpu" else "xla"


def _xla(x: jax.Array, weight: jax.Array, geometry: Geometry) -> jax.Array:
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
        return _xla(x, weight, geometry)
    return taps.forward(x, weight, geometry, form)


def data_gradient(
    grad: jax.Array, weight: jax.Array, spatial: Sequence[int], geometry: Geometry, platform: str
) -> jax.Array:
    """The gradient in an input with extents `spatial`, or the transposed convolution of `grad` onto them."""
    form = _form(grad.dtype, weight.shape, geometry, platform)
    if form != "xla":
        return taps.data_gradient(grad, weight, spatial, geometry, form)
    grad, weight = _operands(platform, grad, weight)
    x = jax.ShapeDtypeStruct((grad.shape[0], weight.shape[1] * geometry.groups, *spatial), grad.dtype)
    return jax.linear_transpose(lambda x: _xla(x, weight, geometry), x)(grad)[0]


def weight_gradient(
    grad: jax.Array, x: jax.Array, weight_shape: Sequence[int], geometry: Geometry, platform: str
) -> jax.Array:
    """The gradient in a weight of `weight_shape`."""
    form = _form(x.dtype, weight_shape, geometry, platform)
    if form != "xla":
        return taps.weight_gradient(grad, x, weight_shape, geometry, form)
    grad, x = _operands(platform, grad, x)
    weight = jax.ShapeDtypeStruct(tuple(weight_shape), x.dtype)
    return jax.linear_transpose(lambda weight: _xla(x, weight, geometry), weight)(grad)[0]


def _transposed_extents(x: jax.Array, weight: jax.Array, extra: Sequence[int], geometry: Geometry) -> list[int]:
    """Spatial extents of a transposed convolution's result; `extra` is torch's ``output_padding``."""
    sizes = zip(
        x.shape[2:],
        weight.shape[2:],
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        Geometry.spread(extra, x.ndim - 2),
        strict=True,
    )
    return [(n - 1) * stride - 2 * pad + dilation * (k - 1) + 1 + out for n, k, stride, pad, dilation, out in sizes]


def _lengthened(x: jax.Array, weight: jax.Array, extents: Sequence[int], geometry: Geometry) -> jax.Array:
    """`x` with zeros behind it, as many rows as the convolution of `extents` has.

    Those are more than the rows of `x` where ``output_padding`` is not below the stride, as torch allows with dilation.
    """
    sizes = zip(extents, weight.shape[2:], geometry.stride, geometry.padding, geometry.dilation, strict=True)
    rows = [(n + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for n, k, stride, pad, dilation in sizes]
    return jnp.pad(x, [(0, 0), (0, 0), *((0, n - m) for n, m in zip(rows, x.shape[2:], strict=True))])


# XLA:TPU's convolutions want filters along the lanes and channels along the sublanes.  Kept otherwise, a weight and its
# momentum are each copied twice in a step: 7 % of the bytes of ResNet-50's, 64 images on a v5p (libtpu 0.0.42).
_KEPT = MappingProxyType({"tpu": MappingProxyType({"weight": (1, 0)})})


@register("convolution", "convolution_overrideable", minor=_KEPT)
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
    geometry = Geometry.of(stride, padding, dilation, groups, x.ndim - 2)
    if transposed:
        extents = _transposed_extents(x, weight, output_padding, geometry)
        y = data_gradient(_lengthened(x, weight, extents, geometry), weight, extents, geometry, platform)
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
        result, source = (_lengthened(x, weight, grad.shape[2:], geometry), grad) if transposed else (grad, x)
        grad_weight = weight_gradient(result, source, weight.shape, geometry, platform)
    return grad_x, grad_weight, grad_bias


@register("convolution_backward", minor=_KEPT)
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
    geometry = Geometry.of(stride, padding, dilation, groups, x.ndim - 2)
    return _gradients(grad, x, weight, geometry, transposed, output_mask, platform)


@register("convolution_backward_overrideable", minor=_KEPT)
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
    geometry = Geometry.of(stride, padding, dilation, groups, x.ndim - 2)
    return _gradients(grad, x, weight, geometry, transposed, output_mask, platform)
