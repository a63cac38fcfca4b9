"""Optimizer steps of 16-bit weights: `xla_amp.master_weights` on lists of arrays.

The operations are our own (``torch.ops.xla_amp``); `xla_amp.pytorch.optim.master_weights` defines them for torch, says
what they mean, and has them in torch's operations for its CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp import master_weights
from xla_amp.lowering.operand import as_dtype
from xla_amp.lowering.registry import register

Arrays = Sequence[jax.Array]

_ARRAYS = master_weights.Arrays(cast=as_dtype, bits=lax.bitcast_convert_type, where=jnp.where)


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return as_dtype(master_weights.rounded(_ARRAYS, x, str(dtype)), dtype)


def joined(weight: jax.Array, rest: jax.Array | None) -> jax.Array:
    """float32 value of a weight and its rest: int16, float32, a 16-bit float, or none."""
    wide = as_dtype(weight, jnp.float32)
    if rest is None:
        return wide
    if rest.dtype == jnp.int16:
        value: jax.Array = master_weights.joined(_ARRAYS, weight, rest)
        return value
    if rest.dtype == jnp.float32:
        return jnp.where(_rounded(rest, weight.dtype) == weight, rest, wide)
    return wide + as_dtype(rest, jnp.float32)


def parted(value: jax.Array, dtype: jnp.dtype, rest: jnp.dtype | None) -> tuple[jax.Array, jax.Array | None]:
    """Weight and rest of a float32 value."""
    weight = _rounded(value, dtype)
    if rest is None:
        return weight, None
    if rest == jnp.int16:
        return weight, master_weights.lower(_ARRAYS, value, weight)
    if rest == jnp.float32:
        return weight, value
    # An infinite weight has no rest.
    error = jnp.where(jnp.isfinite(weight), value - as_dtype(weight, jnp.float32), 0)
    return weight, as_dtype(error, rest)


def at_random(value: jax.Array, seed: jax.Array, count: jax.Array, stream: int) -> jax.Array:
    """`value` (float32) in bfloat16, rounded at random."""
    index = lax.iota(jnp.int32, value.size).reshape(value.shape)
    noise = master_weights.noise(index, as_dtype(seed, jnp.int32), as_dtype(count, jnp.int32), stream)
    weight: jax.Array = master_weights.rounded_at_random(_ARRAYS, value, noise)
    return weight


@register("xla_amp::join_weights")
def join_weights(weights: Arrays, rests: Arrays) -> list[jax.Array]:
    """float32 values."""
    return [joined(weight, rests[i] if rests else None) for i, weight in enumerate(weights)]


@register("xla_amp::part_weights_", mutates=("weights", "rests"))
def part_weights(weights: Arrays, rests: Arrays, values: Arrays, found_inf: jax.Array | None) -> list[jax.Array]:
    """New weights, then new rests; the old ones where the flag is not zero."""
    kinds: list[Any] = [rest.dtype for rest in rests] or [None] * len(weights)
    new = [parted(value, weight.dtype, kind) for value, weight, kind in zip(values, weights, kinds, strict=True)]
    parts = [weight for weight, _ in new] + [rest for _, rest in new if rest is not None]
    return [_unless(found_inf, old, part) for old, part in zip([*weights, *rests], parts, strict=True)]


@register("xla_amp::round_at_random_", mutates=("weights",))
def round_at_random(
    weights: Arrays, values: Arrays, rng_states: Arrays, stream: int, found_inf: jax.Array | None
) -> list[jax.Array]:
    """New weights: each value rounded at random by its (seed, count)."""
    return [
        _unless(found_inf, weight, at_random(value, state[0], state[1], stream))
        for weight, value, state in zip(weights, values, rng_states, strict=True)
    ]


def _unless(found_inf: jax.Array | None, old: jax.Array, new: jax.Array) -> jax.Array:
    return new if found_inf is None else jnp.where(found_inf.reshape(()) != 0, old, new)
