"""Operations on the bits of numbers: ``frexp`` and ``hash_tensor``."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.operand import as_dtype, axes, up
from xla_amp.lowering.registry import register


@register("frexp.Tensor")
def frexp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mantissa with magnitude in [0.5, 1), exponent); 0, infinities and NaN are returned as mantissa."""
    mantissa, exponent = jnp.frexp(up(x))
    return mantissa, exponent


@register("hash_tensor")
def hash_tensor(x: jax.Array, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0) -> jax.Array:
    """Exclusive or of the numbers as 64-bit words: floats by the bits of their float64 value (mode 0, the only one)."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        words = lax.bitcast_convert_type(as_dtype(x, np.float64), np.uint64)
    else:
        words = as_dtype(as_dtype(x, np.int64) if x.dtype.kind == "i" else x, np.uint64)
    over = axes(list(dim), x.ndim)
    result = lax.reduce(words, np.uint64(0), lax.bitwise_xor, over)
    return jnp.expand_dims(result, over) if keepdim else result
