"""Attention by JAX's own kernel for TPUs (`jax.experimental.pallas.ops.tpu.flash_attention`).

The kernel never writes the square matrix of weights.  Its backward pass wants each row's maximum and sum of
exponentials; from what torch keeps, the logarithm of the sum, those are the logarithm and one.  The splash kernel of
the same library would skip masked blocks too, but keeps residuals of its own that torch's operation has no place for.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.attention_parts import Attention
from xla_amp.lowering.contraction import Operand
from xla_amp.lowering.operand import as_dtype, materialize

_BLOCKS = (512, 256, 128)
"""Tile edges, best first; one has to divide the number of rows, one the number of columns."""
LANES = 128
"""Of a TPU's vector registers: the kernel's least tile, and what more features are a multiple of."""


def suits(of: Attention) -> bool:
    """Whether the kernel computes this call: no bias and no dropout, whole tiles, one size of features."""
    features = of.query.shape[-1]
    return (
        of.platform == "tpu"
        and not of.partitioned  # XLA does not split a kernel over a mesh
        and of.bias is None
        and of.rng is None
        and of.dtype in (np.dtype(np.float32), np.dtype(jnp.bfloat16))
        and of.value.shape[-1] == features
        and (features <= LANES or features % LANES == 0)
        and all(extent % LANES == 0 for extent in of.shape[2:])
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
    library, (query, key, value) = _library(), _operands(of)
    with _tracing(of):
        output, total, top = library._flash_attention(
            query, key, value, None, None, True, of.causal, float(of.scale), _sizes(library, of), False
        )
        return output, top + jnp.log(total)


def backward(
    of: Attention, grad: Operand, output: Operand, logsumexp: Operand, bias_wanted: bool
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Gradients of query, key and value."""
    library, (query, key, value) = _library(), _operands(of)
    top = as_dtype(materialize(logsumexp), np.float32)
    with _tracing(of):
        kept = (query, key, value, None, None, materialize(output), jnp.ones_like(top), top)
        dquery, dkey, dvalue, *_ = library._flash_attention_bwd(
            False, of.causal, float(of.scale), _sizes(library, of), False, kept, materialize(grad)
        )
        return dquery, _summed(dkey, of), _summed(dvalue, of), None


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


@contextlib.contextmanager
def _tracing(of: Attention) -> Any:
    """The kernel indexes with 32 bits, and computes float32 in full where float32 is what it is given."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(False))
        if of.dtype == np.float32:
            stack.enter_context(jax.default_matmul_precision("highest"))
        yield


def _sizes(library: Any, of: Attention) -> Any:
    rows, columns = (next(edge for edge in _BLOCKS if extent % edge == 0) for extent in of.shape[2:])
    return library.BlockSizes(
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
