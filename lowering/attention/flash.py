"""Attention by `jax.experimental.pallas.ops.tpu.flash_attention`, which scales the scores in float32.

Its backward pass wants each row's maximum and sum of exponentials; from what torch keeps, the logarithm of the sum,
those are the logarithm and one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.attention import tpu_kernels
from xla_amp.lowering.attention.common import Attention
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import as_dtype, materialize


def suits(of: Attention) -> bool:
    """Whether the kernel computes this call: one size of features, which fill no more than or whole registers."""
    features = of.query.shape[-1]
    return (
        of.value.shape[-1] == features
        and (features <= tpu_kernels.LANES or features % tpu_kernels.LANES == 0)
        and tpu_kernels.takes(of)
        and _library() is not None
    )


@functools.cache
def _library() -> Any:
    """JAX's module; None in a JAX that lacks it or its forward and backward functions, which are private names."""
    try:
        from jax.experimental.pallas.ops.tpu import flash_attention
    except ImportError:
        return None
    needed = ("BlockSizes", "_flash_attention", "_flash_attention_bwd")
    return flash_attention if all(hasattr(flash_attention, name) for name in needed) else None


def forward(of: Attention) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp)."""
    with tpu_kernels.tracing(of):
        return _forward(*_operands(of), causal=of.causal, scale=float(of.scale))


def backward(
    of: Attention, grad: Operand, output: Operand, logsumexp: Operand, bias_wanted: bool
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Gradients of query, key and value."""
    with tpu_kernels.tracing(of):
        kept = (materialize(output), as_dtype(materialize(logsumexp), np.float32))
        dquery, dkey, dvalue = _backward(
            *_operands(of), *kept, materialize(grad), causal=of.causal, scale=float(of.scale)
        )
        return dquery, _summed(dkey, of), _summed(dvalue, of), None


# Under `jit`, so that the layers of a model share one trace of each kernel.
@functools.partial(jax.jit, static_argnames=("causal", "scale"))
def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    no_bias = no_segments = None
    output, total, top = _library()._flash_attention(
        query, key, value, no_bias, no_segments, True, causal, scale, _sizes(query, key), False
    )
    return output, top + jnp.log(total)


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
    kept = (query, key, value, no_bias, no_segments, output, jnp.ones_like(logsumexp), logsumexp)
    dquery, dkey, dvalue, *_ = _library()._flash_attention_bwd(
        False, causal, scale, _sizes(query, key), False, kept, grad
    )
    return dquery, dkey, dvalue


def _operands(of: Attention) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value with as many heads each."""
    query, key, value = (materialize(x) for x in (of.query, of.key, of.value))
    if of.groups > 1:
        key, value = (jnp.repeat(x, of.groups, axis=1) for x in (key, value))
    return query, key, value


def _summed(gradient: jax.Array, of: Attention) -> jax.Array:
    """The gradient of a key head from those of the heads that share it."""
    if of.groups == 1:
        return gradient
    batch, heads, *rest = gradient.shape
    return jnp.sum(gradient.reshape(batch, heads // of.groups, of.groups, *rest), 2, dtype=np.float32)


def _sizes(query: jax.Array, key: jax.Array) -> Any:
    rows, columns = tpu_kernels.edges(query.shape[2], key.shape[2])
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
