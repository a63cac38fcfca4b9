"""Fake quantization: values rounded to a grid of integers in floating point, for quantization-aware training.

All round half to even, after a product with 1 / scale, as torch's kernels do.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register

Pair = tuple[jax.Array, jax.Array]


def _level(x: jax.Array, scale: jax.Array, zero_point: jax.Array) -> jax.Array:
    """The integer, in the dtype of `x`, that stands for `x`; it may be out of range."""
    return jnp.round(x * (1 / as_dtype(scale, x.dtype))) + as_dtype(zero_point, x.dtype)


def _on_grid(x: jax.Array, scale: jax.Array, zero_point: jax.Array, quant_min: int, quant_max: int) -> Pair:
    """`x` rounded to the grid, in its opmath dtype, and where it is in range."""
    value = up(x)
    level = _level(value, scale, zero_point)
    inside = (level >= quant_min) & (level <= quant_max)
    levels = jnp.clip(level, quant_min, quant_max) - as_dtype(zero_point, value.dtype)
    return levels * as_dtype(scale, value.dtype), inside


def _along(axis: int, x: jax.Array, scale: jax.Array, zero_point: jax.Array) -> Pair:
    """Both, of shape [channels], in the shape that broadcasts against dimension `axis` of `x`."""
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    return scale.reshape(shape), zero_point.reshape(shape)


@register("fake_quantize_per_tensor_affine_cachemask", lifted=("scale",))
def fake_quantize(x: jax.Array, scale: jax.Array, zero_point: int, quant_min: int, quant_max: int) -> Pair:
    return _on_grid(x, scale, jnp.asarray(zero_point), quant_min, quant_max)


@register("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def fake_quantize_by_tensors(
    x: jax.Array, scale: jax.Array, zero_point: jax.Array, enabled: jax.Array, quant_min: int, quant_max: int
) -> Pair:
    """`enabled` [1] is data: where it is 0, nothing is rounded and all values count as in range."""
    value, inside = _on_grid(x, scale.reshape(()), zero_point.reshape(()), quant_min, quant_max)
    on = enabled.reshape(()) != 0
    return jnp.where(on, value, up(x)), jnp.where(on, inside, True)


@register("fake_quantize_per_channel_affine_cachemask")
def fake_quantize_channels(
    x: jax.Array, scale: jax.Array, zero_point: jax.Array, axis: int, quant_min: int, quant_max: int
) -> Pair:
    """`scale` and `zero_point` have shape [channels], the size of dimension `axis`."""
    return _on_grid(x, *_along(axis, x, scale, zero_point), quant_min, quant_max)


# ---- observed: the grid follows a moving average of the extremes -----------------------------------------------------

_LEAST_SCALE = np.float32(6.1e-5)
"""Smaller scales would be subnormal in float16."""


def _grid(low: jax.Array, high: jax.Array, quant_min: int, quant_max: int, symmetric: bool) -> Pair:
    """Scale (float32) and zero point (int32) of the grid over [low, high], both float32.

    Source: ``quant_utils::ChooseQuantizationParams`` (ATen/native/quantized/cpu/QuantUtils.h); float64 where it has it.
    """
    double = jax.dtypes.canonicalize_dtype(jnp.float64)
    steps = quant_max - quant_min
    if symmetric:
        least, most = -(steps // 2 + 1), steps // 2
        widest = as_dtype(jnp.maximum(abs(low / least), abs(high / most)), double)
        both_signs = (low < 0) & (high > 0)
        low = jnp.where(both_signs, as_dtype(widest * least, low.dtype), low)
        high = jnp.where(both_signs, as_dtype(widest * most, high.dtype), high)
    low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)  # 0 is on the grid
    scale = (as_dtype(high, double) - as_dtype(low, double)) / steps
    single = as_dtype(scale, low.dtype)
    scale = jnp.where((single == 0) | jnp.isinf(1 / single), 0.1, scale)
    small = scale < _LEAST_SCALE
    factor = _LEAST_SCALE / as_dtype(scale, low.dtype)
    wide = _LEAST_SCALE * np.float32(steps)
    stretched = jnp.where(high == 0, -wide, low * factor), jnp.where(low == 0, wide, high * factor)
    low, high = (jnp.where(small, new, old) for new, old in zip(stretched, (low, high), strict=True))
    scale = jnp.where(small, as_dtype(_LEAST_SCALE, double), scale)
    below, above = as_dtype(low, double) / scale, as_dtype(high, double) / scale
    from_low = abs(quant_min) - abs(below) < abs(quant_max) - abs(above)  # the sum of smaller terms is more exact
    zero = jnp.where(from_low, quant_min - below, quant_max - above)
    if symmetric:
        zero = jnp.where((low < 0) & (high > 0), (quant_min + quant_max) / 2, zero)
    zero = jnp.round(jnp.clip(zero, quant_min, quant_max))
    return as_dtype(scale, low.dtype), as_dtype(zero, np.int32)


@register("_fused_moving_avg_obs_fq_helper", mutates=("running_min", "running_max", "scale", "zero_point"))
def fake_quantize_observed(
    x: jax.Array,
    observer_on: jax.Array,
    fake_quant_on: jax.Array,
    running_min: jax.Array,
    running_max: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> tuple[jax.Array, ...]:
    """Updates the extremes where `observer_on`, and rounds to their grid where `fake_quant_on`; both are data.

    The extremes, the scale and the zero point have one element, or one for each element of dimension `ch_axis`.
    """
    value = up(x)
    others = tuple(i for i in range(x.ndim) if i != ch_axis % x.ndim) if per_row_fake_quant else None
    observe, quantize = (flag.reshape(()) != 0 for flag in (observer_on, fake_quant_on))

    def follow(old: jax.Array, new: Any) -> jax.Array:
        new = as_dtype(new, old.dtype).reshape(old.shape)
        new = jnp.where(jnp.isinf(old), new, old + as_dtype(averaging_const, old.dtype) * (new - old))
        return jnp.where(observe, new, old)

    low, high = follow(running_min, value.min(others)), follow(running_max, value.max(others))
    found = _grid(low, high, quant_min, quant_max, symmetric_quant)
    scale, zero_point = (
        jnp.where(quantize, as_dtype(new, old.dtype).reshape(old.shape), old)
        for new, old in zip(found, (scale, zero_point), strict=True)
    )
    grid = _along(ch_axis, x, scale, zero_point) if per_row_fake_quant else (scale.reshape(()), zero_point.reshape(()))
    rounded, inside = _on_grid(x, *grid, quant_min, quant_max)
    rounded, inside = jnp.where(quantize, rounded, value), jnp.where(quantize, inside, True)
    return rounded, inside, low, high, scale, zero_point
