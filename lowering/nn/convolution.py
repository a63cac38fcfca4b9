"""Convolution in one to three dimensions, plain and transposed, and its gradients.

A convolution is three linear maps that share one `Geometry`: `forward`, `data_gradient` (its transpose in the input)
and `weight_gradient` (its transpose in the weight).  A transposed convolution is the same three with input and result
exchanged.  Layout is torch's: ``(N, C, *spatial)`` and ``(O, C / groups, *kernel)``.

`FORMS` has the ways to compute the three: XLA's convolution, and on CPU sums over taps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from xla_amp.lowering import forms
from xla_amp.lowering.forms import Form
from xla_amp.lowering.linalg.contraction import precision
from xla_amp.lowering.nn import convolution_taps as taps
from xla_amp.lowering.nn.convolution_taps import Geometry
from xla_amp.lowering.operand import up
from xla_amp.lowering.registry import register

MIN_DOT_CHANNELS = 128
"""Channels from which one bfloat16 dot per tap is faster than XLA:CPU's float32 convolution."""
_MAX_POINTWISE_ROWS = 1024
"""Elements of a channel up to which a pointwise bfloat16 convolution is faster with channels last."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution:
    """What the choice of a form depends on."""

    dtype: np.dtype
    weight_shape: tuple[int, ...]
    geometry: Geometry
    rows: int
    """Elements of one channel of the result: the batch times the spatial extents."""
    platform: str

    @property
    def summary(self) -> str:
        """Sizes and dtype, for people."""
        filters, channels, *kernel = self.weight_shape
        groups, size = self.geometry.groups, " x ".join(map(str, kernel))
        grouped = f", {groups} groups" if groups > 1 else ""
        sizes = f"{channels * groups} channels, {filters} filters of {size}{grouped}"
        return f"{sizes}, {self.rows} elements a channel, {self.dtype}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionForm(Form[Convolution]):
    """One way to compute a convolution: the map, and its transposes in the input and in the weight."""

    forward: Callable[[jax.Array, jax.Array, Geometry], jax.Array]
    data_gradient: Callable[[jax.Array, jax.Array, Sequence[int], Geometry], jax.Array]
    weight_gradient: Callable[[jax.Array, jax.Array, Sequence[int], Geometry], jax.Array]


def _xla_data_gradient(grad: jax.Array, weight: jax.Array, spatial: Sequence[int], geometry: Geometry) -> jax.Array:
    x = jax.ShapeDtypeStruct((grad.shape[0], weight.shape[1] * geometry.groups, *spatial), grad.dtype)
    grad_x: jax.Array = jax.linear_transpose(lambda x: _xla_convolution(x, weight, geometry), x)(grad)[0]
    return grad_x


def _xla_weight_gradient(grad: jax.Array, x: jax.Array, weight_shape: Sequence[int], geometry: Geometry) -> jax.Array:
    weight = jax.ShapeDtypeStruct(tuple(weight_shape), x.dtype)
    transpose = jax.linear_transpose(lambda weight: _xla_convolution(x, weight, geometry), weight)
    grad_weight: jax.Array = transpose(grad)[0]
    return grad_weight


def _wide_weight_gradient(grad: jax.Array, x: jax.Array, weight_shape: Sequence[int], geometry: Geometry) -> jax.Array:
    """`_xla_weight_gradient` with a float32 result; `jax.linear_transpose` would give it the dtype of the operands."""

    def transposed(grad: jax.Array, x: jax.Array) -> jax.Array:
        return _xla_weight_gradient(grad, x, weight_shape, geometry)

    closed = jax.make_jaxpr(transposed)(grad, x)
    wide = {"preferred_element_type": np.dtype(np.float32)}
    equations = [
        each.replace(params={**each.params, **wide}) if each.primitive is lax.conv_general_dilated_p else each
        for each in closed.jaxpr.eqns
    ]
    grad_weight: jax.Array
    [grad_weight] = jaxpr_as_fun(closed.replace(jaxpr=closed.jaxpr.replace(eqns=equations)))(grad, x)
    return grad_weight


def _up(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function` of its first two arguments in float32: XLA:CPU has no faster kernel for half types."""
    return lambda first, second, *rest: function(up(first), up(second), *rest)


def _taps(name: taps.Taps, why: str, supports: Callable[[Convolution], str | None]) -> ConvolutionForm:
    return ConvolutionForm(
        name=name,
        why=why,
        platforms=("cpu",),
        supports=supports,
        forward=functools.partial(taps.forward, form=name),
        data_gradient=functools.partial(taps.data_gradient, form=name),
        weight_gradient=functools.partial(taps.weight_gradient, form=name),
    )


def _is_depthwise(call: Convolution) -> bool:
    filters, channels = call.weight_shape[:2]
    return call.geometry.groups > 1 and filters == call.geometry.groups and channels == 1


def _has_many_taps(call: Convolution) -> bool:
    return math.prod(call.weight_shape[2:]) > 1


def _channels_last(call: Convolution) -> str | None:
    if call.dtype != jnp.bfloat16 or call.geometry.groups > 1:
        return "not bfloat16, or several groups"
    if not _has_many_taps(call):
        return f"over {_MAX_POINTWISE_ROWS} elements a channel" if call.rows > _MAX_POINTWISE_ROWS else None
    narrow = min(call.weight_shape[:2]) < MIN_DOT_CHANNELS
    return f"fewer than {MIN_DOT_CHANNELS} channels or filters" if narrow else None


FORMS: Final = (
    _taps(
        "depthwise",
        "XLA:CPU has no kernel for groups that deserves the name",
        lambda call: None if _is_depthwise(call) else "not one channel and one filter in each group",
    ),
    _taps(
        "channels_last",
        "one bfloat16 dot for each tap beats a float32 convolution; a large weight is not transposed",
        _channels_last,
    ),
    _taps(
        "channels_first",
        "one dot of all groups for each tap; no copy for a single tap",
        lambda call: "several taps, one group" if call.geometry.groups == 1 and _has_many_taps(call) else None,
    ),
    ConvolutionForm(
        name="xla, in float32",
        why="XLA:CPU's convolution, which has no faster kernel for half types",
        platforms=("cpu",),
        forward=_up(_xla_convolution),
        data_gradient=_up(_xla_data_gradient),
        weight_gradient=_up(_xla_weight_gradient),
    ),
    ConvolutionForm(
        name="xla",
        why="XLA's convolution of the operands as they are",
        forward=_xla_convolution,
        data_gradient=_xla_data_gradient,
        weight_gradient=_xla_weight_gradient,
    ),
)
"""In order of preference: the first without an objection is used; lowering/README.md has the measurements."""


def form_of(
    dtype: np.dtype, weight_shape: Sequence[int], geometry: Geometry, rows: int, platform: str
) -> ConvolutionForm:
    """The form in which a convolution and its gradients are computed; the arguments are those of `Convolution`."""
    shape = tuple(weight_shape)
    call = Convolution(dtype=np.dtype(dtype), weight_shape=shape, geometry=geometry, rows=rows, platform=platform)
    return forms.choose("convolution", FORMS, call)


def _rows(result: jax.Array) -> int:
    return result.shape[0] * math.prod(result.shape[2:])


def forward(x: jax.Array, weight: jax.Array, geometry: Geometry, platform: str) -> jax.Array:
    """The convolution of `x` with `weight`."""
    rows = x.shape[0] * math.prod(geometry.extents(x.shape[2:], weight.shape[2:]))
    return form_of(x.dtype, weight.shape, geometry, rows, platform).forward(x, weight, geometry)


def data_gradient(
    grad: jax.Array, weight: jax.Array, spatial: Sequence[int], geometry: Geometry, platform: str
) -> jax.Array:
    """The gradient of an input with spatial extents `spatial`, or the transposed convolution of `grad` to them."""
    form = form_of(grad.dtype, weight.shape, geometry, _rows(grad), platform)
    return form.data_gradient(grad, weight, spatial, geometry)


def weight_gradient(
    grad: jax.Array, x: jax.Array, weight_shape: Sequence[int], geometry: Geometry, platform: str, wide: bool = False
) -> jax.Array:
    """The gradient of a weight of shape `weight_shape`; with `wide` that of half operands is float32."""
    form = form_of(x.dtype, weight_shape, geometry, _rows(grad), platform)
    if wide and form.weight_gradient is _xla_weight_gradient:
        return _wide_weight_gradient(grad, x, weight_shape, geometry)
    return form.weight_gradient(grad, x, weight_shape, geometry)  # the others sum in float32


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


@register("convolution_backward_overrideable", minor=_WEIGHT_LAYOUT)
def convolution_backward(
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
    wide: bool = False,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    geometry = Geometry.from_torch(stride, padding, dilation, groups, x.ndim - 2)
    grad_x = grad_weight = grad_bias = None
    if output_mask[2]:
        grad_bias = jnp.sum(up(grad), axis=(0, *range(2, grad.ndim)))
    if output_mask[0]:
        if transposed:
            grad_x = forward(grad, weight, geometry, platform)[(..., *map(slice, x.shape[2:]))]
        else:
            grad_x = data_gradient(grad, weight, x.shape[2:], geometry, platform)
    if output_mask[1]:
        result, source = (_pad_to_result(x, weight, grad.shape[2:], geometry), grad) if transposed else (grad, x)
        grad_weight = weight_gradient(result, source, weight.shape, geometry, platform, wide)
    return grad_x, grad_weight, grad_bias


@register("convolution_backward", minor=_WEIGHT_LAYOUT)
def convolution_backward_of_bias_sizes(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    *geometry: Any,
    platform: str,
    wide: bool = False,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    return convolution_backward(grad, x, weight, *geometry, platform=platform, wide=wide)
