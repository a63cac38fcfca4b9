"""Complex numbers from their parts.  What computes with them is elementwise; what looks at their parts is a view."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.operand import up
from xla_amp.lowering.registry import register


@register("complex")
def from_parts(real: jax.Array, imag: jax.Array) -> jax.Array:
    """complex64 of float32 parts (also of halves, for which XLA has no complex type), complex128 of float64."""
    return lax.complex(*jnp.broadcast_arrays(up(real), up(imag)))


@register("polar")
def from_polar(magnitude: jax.Array, angle: jax.Array) -> jax.Array:
    magnitude, angle = up(magnitude), up(angle)
    return from_parts(magnitude * jnp.cos(angle), magnitude * jnp.sin(angle))
