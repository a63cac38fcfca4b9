"""Attention by `jax.experimental.pallas.ops.tpu.splash_attention`, which leaves out the tiles that a mask hides.

What its backward pass wants of the forward pass is what torch keeps: the logarithm of each row's sum of exponentials.
The kernel has no factor of the scores, so the query takes it; in bfloat16 only a power of two leaves it exact.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np

from xla_amp.lowering.attention import tpu_kernels
from xla_amp.lowering.attention.common import Attention
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import as_dtype, materialize


def suits(of: Attention) -> bool:
    """Whether the kernel computes this call as exactly as its dtype allows."""
    exact = of.dtype == np.float32 or math.frexp(abs(float(of.scale)))[0] == 0.5
    return exact and tpu_kernels.takes(of) and _library() is not None


@functools.cache
def _library() -> Any:
    """JAX's package; None in a JAX that lacks it or its backward function, which is a private name."""
    try:
        from jax.experimental.pallas.ops.tpu import splash_attention
    except ImportError:
        return None
    return splash_attention if hasattr(splash_attention.splash_attention_kernel, "_splash_attention_bwd") else None


def forward(of: Attention) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp)."""
    with tpu_kernels.tracing(of):
        output, logsumexp = _forward(*_operands(of), causal=of.causal)
        return _split(output, of), _split(logsumexp, of)


def backward(
    of: Attention, grad: Operand, output: Operand, logsumexp: Operand, bias_wanted: bool
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Gradients of query, key and value."""
    with tpu_kernels.tracing(of):
        kept = (_joined(output), as_dtype(_joined(logsumexp), np.float32))
        dquery, dkey, dvalue = (
            _split(x, of) for x in _backward(*_operands(of), *kept, _joined(grad), causal=of.causal)
        )
        return _scaled(dquery, of), dkey, dvalue, None


def _operands(of: Attention) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _joined(_scaled(materialize(of.query), of)), _joined(of.key), _joined(of.value)


def _scaled(x: jax.Array, of: Attention) -> jax.Array:
    return x * of.scale.astype(of.dtype)


def _joined(x: Operand) -> jax.Array:
    """[batch, heads, ...] as [batch * heads, ...]; each key head still serves as many heads."""
    return materialize(x).reshape(-1, *x.shape[2:])


def _split(x: jax.Array, of: Attention) -> jax.Array:
    return x.reshape(of.shape[0], -1, *x.shape[1:])


# Under `jit`, so that the layers of a model share one trace of each kernel.
@functools.partial(jax.jit, static_argnames="causal")
def _forward(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> tuple[jax.Array, jax.Array]:
    output, (logsumexp,) = _kernel(query, key, value, causal)(query, key, value)
    return output, logsumexp


@functools.partial(jax.jit, static_argnames="causal")
def _backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array,
    logsumexp: jax.Array,
    grad: jax.Array,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    kernel = _kernel(query, key, value, causal)
    of_library = _library().splash_attention_kernel._splash_attention_bwd
    no_segments = no_sinks = None
    kept = (query, key, value, no_segments, no_sinks, output, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info)
    *_, dquery, dkey, dvalue, _, _ = of_library(**kernel.kwargs, res=kept, do=grad)
    return dquery, dkey, dvalue


def _kernel(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> Any:
    library = _library()
    shape = query.shape[1], key.shape[1]
    rows, columns = tpu_kernels.edges(*shape)

    def order(x: jax.Array) -> Any:
        # Features that do not fill the lanes are padded to them in memory, so the tokens come last.
        fill = x.shape[-1] % tpu_kernels.LANES == 0
        return library.QKVLayout.HEAD_DIM_MINOR if fill else library.QKVLayout.SEQ_MINOR

    sizes = library.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
        q_layout=order(query),
        k_layout=order(key),
        v_layout=order(value),
    )
    mask = (library.CausalMask if causal else library.FullMask)(shape)
    return library.make_splash_mha_single_device(
        library.MultiHeadMask([mask]),  # one serves all heads
        block_sizes=sizes,
        save_residuals=True,
    )
