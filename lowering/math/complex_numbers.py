"""Complex numbers from their parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.operand import up
from xla_amp.lowering.registry import register


@register("complex")
def from_parts(real: jax.Array, imag: jax.Array) -> jax.Array:
    """complex64 of float32 parts (also of half parts, since XLA has no complex half), complex128 of float64 parts."""
    return lax.complex(*jnp.broadcast_arrays(up(real), up(imag)))


@register("polar")
def from_polar(magnitude: jax.Array, angle: jax.Array) -> jax.Array:
    magnitude, angle = up(magnitude), up(angle)
    return from_parts(magnitude * jnp.cos(angle), magnitude * jnp.sin(angle))
