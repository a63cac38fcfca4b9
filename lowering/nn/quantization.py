"""Fake quantization: values rounded to a quantized grid and kept as floats, for quantization-aware training.

Formulas: torch's ``fake_quantize_*_affine_cachemask`` (ATen/native/quantized/cpu/kernels/QuantizedOpKernels.cpp).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register

Pair = tuple[jax.Array, jax.Array]


def _on_grid(x: jax.Array, scale: jax.Array, zero_point: jax.Array, quant_min: int, quant_max: int) -> Pair:
    """`x` rounded to the grid, and where it is in range.  As torch: multiply by 1 / scale, then round half to even."""
    value = up(x)
    scale, zero_point = as_dtype(scale, value.dtype), as_dtype(zero_point, value.dtype)
    level = jnp.round(value * (1 / scale)) + zero_point
    inside = (level >= quant_min) & (level <= quant_max)
    return (jnp.clip(level, quant_min, quant_max) - zero_point) * scale, inside


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
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    return _on_grid(x, scale.reshape(shape), zero_point.reshape(shape), quant_min, quant_max)
