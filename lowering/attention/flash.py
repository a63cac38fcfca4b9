"""Attention by `jax.experimental.pallas.ops.tpu.flash_attention`, which scales the scores in float32.

Its backward pass takes each row's maximum and sum of exponentials.  torch keeps the logarithm of the sum: that
logarithm as the maximum, with a sum of one, is equivalent.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.attention import tpu_kernels
from xla_amp.lowering.attention.attention_call import Attention, AttentionForm
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import as_dtype, materialize


def supports(call: Attention) -> str | None:
    """Why the kernel cannot compute this call: features that differ, or neither fit nor fill whole registers."""
    features = call.query.shape[-1]
    if call.value.shape[-1] != features:
        return "the result has other features than the query"
    if features > tpu_kernels.LANES and features % tpu_kernels.LANES:
        return f"more than {tpu_kernels.LANES} features must be a multiple of it"
    return tpu_kernels.objection(call) or (None if _library() else "this JAX lacks the kernel")


def cost(call: Attention) -> int:
    """Bytes of temporary memory: `tpu_kernels.LANES` copies of each row's maximum, sum and gradient sum."""
    return 3 * tpu_kernels.LANES * call.row_statistics


@functools.cache
def _library() -> Any:
    """JAX's module; None if this JAX lacks it or its forward and backward functions, which are private."""
    try:
        from jax.experimental.pallas.ops.tpu import flash_attention
    except ImportError:
        return None
    needed = ("BlockSizes", "_flash_attention", "_flash_attention_bwd")
    return flash_attention if all(hasattr(flash_attention, name) for name in needed) else None


def forward(call: Attention) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp)."""
    with tpu_kernels.trace_settings(call):
        result: tuple[jax.Array, jax.Array] = _forward(*_operands(call), causal=call.causal, scale=float(call.scale))
        return result


def backward(
    call: Attention, grad: Operand, output: Operand, logsumexp: Operand, needs_bias: bool
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Gradients of query, key and value."""
    with tpu_kernels.trace_settings(call):
        results = (materialize(output), as_dtype(materialize(logsumexp), np.float32))
        dquery, dkey, dvalue = _backward(
            *_operands(call), *results, materialize(grad), causal=call.causal, scale=float(call.scale)
        )
        return dquery, _sum_groups(dkey, call), _sum_groups(dvalue, call), None


# `jit` lets the layers of a model share one trace of each kernel.
@functools.partial(jax.jit, static_argnames=("causal", "scale"))
def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    no_bias = no_segments = None
    output, total, maximum = _library()._flash_attention(
        query, key, value, no_bias, no_segments, True, causal, scale, _block_sizes(query, key), False
    )
    return output, maximum + jnp.log(total)


@functools.partial(jax.jit, static_argnames=("causal", "scale"))
def _backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array,
    logsumexp: jax.Array,
    grad: jax.Array,
    causal: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    no_bias = no_segments = None
    residuals = (query, key, value, no_bias, no_segments, output, jnp.ones_like(logsumexp), logsumexp)
    dquery, dkey, dvalue, *_ = _library()._flash_attention_bwd(
        False, causal, scale, _block_sizes(query, key), False, residuals, grad
    )
    return dquery, dkey, dvalue


def _operands(call: Attention) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value, with keys and values repeated for each head."""
    query, key, value = (materialize(x) for x in (call.query, call.key, call.value))
    if call.groups > 1:
        key, value = (jnp.repeat(x, call.groups, axis=1) for x in (key, value))
    return query, key, value


def _sum_groups(gradient: jax.Array, call: Attention) -> jax.Array:
    """The gradient of each key head: the sum over the heads that share it."""
    if call.groups == 1:
        return gradient
    batch, heads, *rest = gradient.shape
    return jnp.sum(gradient.reshape(batch, heads // call.groups, call.groups, *rest), 2, dtype=np.float32)


def _block_sizes(query: jax.Array, key: jax.Array) -> Any:
    rows, columns = tpu_kernels.tile_shape(query.shape[2], key.shape[2])
    return _library().BlockSizes(
        block_b=1,
        block_q=rows,
        block_k_major=columns,
        block_k=columns,
        block_q_major_dkv=rows,
        block_q_dkv=rows,
        block_k_major_dkv=columns,
        block_k_dkv=columns,
        block_q_dq=rows,
        block_k_major_dq=columns,
        block_k_dq=columns,
    )


FORM: Final = AttentionForm(
    name="flash",
    why="as splash, where a scaled query would be rounded; it keeps 128 copies of each row's statistics",
    platforms=("tpu",),
    marks=tpu_kernels.MARKS,
    min_columns=1024,
    supports=supports,
    forward=forward,
    backward=backward,
    cost=cost,
)
