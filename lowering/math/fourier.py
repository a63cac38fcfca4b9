"""Fourier transforms, and complex numbers made of real ones.

torch reduces all of them to three: complex to complex, real to complex and complex to real, over the dimensions `dim`
(the last one is halved).  The normalization is 0 for none, 1 for division by the square root of the number of points, 2
for division by that number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.operand import up
from xla_amp.lowering.registry import register

_EXPONENTS = {0: 0.0, 1: -0.5, 2: -1.0}
"""Normalization -> exponent of the number of points.  Source: ``fft_norm_mode`` (ATen/native/SpectralOpsUtils.h)."""


def _scaled(x: jax.Array, points: int, normalization: int) -> jax.Array:
    if normalization == 0 or points == 0:
        return x
    return x * np.asarray(points ** _EXPONENTS[normalization], np.dtype(x.real.dtype))


def _points(shape: Sequence[int], dim: Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in dim)


def _transform(x: jax.Array, dim: Sequence[int], forward: bool) -> jax.Array:
    """Complex to complex, not normalized in either direction."""
    if not dim or not x.size:
        return x
    return (jnp.fft.fftn if forward else jnp.fft.ifftn)(x, axes=dim, norm=None if forward else "forward")


@register("_fft_c2c")
def complex_to_complex(x: jax.Array, dim: list[int], normalization: int, forward: bool) -> jax.Array:
    return _scaled(_transform(x, dim, forward), _points(x.shape, dim), normalization)


@register("_fft_r2c")
def real_to_complex(x: jax.Array, dim: list[int], normalization: int, onesided: bool) -> jax.Array:
    """`onesided`: only the first half of the last dimension in `dim`, which determines the rest."""
    points = _points(x.shape, dim)
    if not onesided:
        return _scaled(_transform(x + 0j, dim, True), points, normalization)
    half = jnp.fft.rfft(x, axis=dim[-1])
    return _scaled(_transform(half, dim[:-1], True), points, normalization)


@register("_fft_c2r")
def complex_to_real(x: jax.Array, dim: list[int], normalization: int, last_dim_size: int) -> jax.Array:
    """The inverse of a one-sided transform; the last dimension in `dim` gets `last_dim_size` points."""
    points = _points(x.shape, dim[:-1]) * last_dim_size
    half = _transform(x, dim[:-1], False)
    return _scaled(jnp.fft.irfft(half, n=last_dim_size, axis=dim[-1], norm="forward"), points, normalization)


# ---- complex numbers -------------------------------------------------------------------------------------------------


@register("complex")
def from_parts(real: jax.Array, imag: jax.Array) -> jax.Array:
    """complex64 of float32 parts (also of half parts, since XLA has no complex half), complex128 of float64 parts."""
    return lax.complex(*jnp.broadcast_arrays(up(real), up(imag)))


@register("polar")
def from_polar(magnitude: jax.Array, angle: jax.Array) -> jax.Array:
    magnitude, angle = up(magnitude), up(angle)
    return from_parts(magnitude * jnp.cos(angle), magnitude * jnp.sin(angle))
