"""Attention by `jax.experimental.pallas.ops.tpu.splash_attention`, which skips the tiles that the mask hides.

Its backward pass takes what torch keeps: the logarithm of each row's sum of exponentials.  The kernel does not scale
the scores, so the query is scaled.  In bfloat16 that is exact only for a power of two.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.attention.attention_call import Attention, AttentionForm
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import as_dtype, materialize

_MARKS: Final = ("mosaic", "tpu_custom_call")
_LANES: Final = 128
"""Lanes of a TPU's vector registers: the kernels' smallest tile."""
_TILE_EDGES: Final = (512, 256, 128)
"""Tile edges, best first.  A tile edge must divide the number of rows, or of columns."""
_MAX_ROW_BYTES: Final = 1024
"""Bytes of a row of queries, keys or values.  Tiles of longer rows do not fit into the VMEM of a v5e or a v5p."""


def _objection(call: Attention) -> str | None:
    """Why the kernel does not compute this call: a bias, dropout, parts of tiles, too long rows."""
    if in_the_way := call.objection_to_kernels((np.float32, jnp.bfloat16)):
        return in_the_way
    if call.bias is not None:
        return "it has a mask or bias"
    if any(extent % _LANES for extent in call.shape[2:]):
        return f"rows and columns must be multiples of {_LANES}"
    features = max(call.query.shape[-1], call.value.shape[-1])
    return "too many features for VMEM" if features * call.dtype.itemsize > _MAX_ROW_BYTES else None


def _tile_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    tile_rows, tile_columns = (next(edge for edge in _TILE_EDGES if n % edge == 0) for n in (rows, columns))
    return tile_rows, tile_columns


@contextlib.contextmanager
def _trace_settings(call: Attention) -> Iterator[None]:
    """Trace with 32-bit indices, and with full float32 products for float32 operands."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(False))
        if call.dtype == np.float32:
            stack.enter_context(jax.default_matmul_precision("highest"))
        yield


def supports(call: Attention) -> str | None:
    """Why the kernel cannot compute this call without an additional rounding of the query."""
    exact = call.dtype == np.float32 or math.frexp(abs(float(call.scale)))[0] == 0.5
    if in_the_way := _objection(call):
        return in_the_way
    if not exact:
        return "a scaled query would be rounded: the factor of the scores is no power of two"
    return None if _library() else "this JAX lacks the kernel"


@functools.cache
def _library() -> Any:
    """JAX's package; None if this JAX lacks it or its backward function, which is private."""
    try:
        from jax.experimental.pallas.ops.tpu import splash_attention
    except ImportError:
        return None
    return splash_attention if hasattr(splash_attention.splash_attention_kernel, "_splash_attention_bwd") else None


def forward(call: Attention) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp)."""
    with _trace_settings(call):
        output, logsumexp = _forward(*_operands(call), causal=call.causal)
        return _split_heads(output, call), _split_heads(logsumexp, call)


def backward(
    call: Attention, grad: Operand, output: Operand, logsumexp: Operand, needs_bias: bool
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Gradients of query, key and value."""
    with _trace_settings(call):
        results = (_merge_heads(output), as_dtype(_merge_heads(logsumexp), np.float32))
        dquery, dkey, dvalue = (
            _split_heads(x, call) for x in _backward(*_operands(call), *results, _merge_heads(grad), causal=call.causal)
        )
        return _scale(dquery, call), dkey, dvalue, None


def _operands(call: Attention) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _merge_heads(_scale(materialize(call.query), call)), _merge_heads(call.key), _merge_heads(call.value)


def _scale(x: jax.Array, call: Attention) -> jax.Array:
    return x * call.scale.astype(call.dtype)


def _merge_heads(x: Operand) -> jax.Array:
    """[batch, heads, ...] as [batch * heads, ...]; the number of heads that share a key head stays the same."""
    return materialize(x).reshape(-1, *x.shape[2:])


def _split_heads(x: jax.Array, call: Attention) -> jax.Array:
    return x.reshape(call.shape[0], -1, *x.shape[1:])


# `jit` lets the layers of a model share one trace of each kernel.
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
    kernel_backward = _library().splash_attention_kernel._splash_attention_bwd
    no_segments = no_sinks = None
    masks = (kernel.dq_mask_info, kernel.dkv_mask_info)
    residuals = (query, key, value, no_segments, no_sinks, output, logsumexp, *masks)
    *_, dquery, dkey, dvalue, _, _ = kernel_backward(**kernel.kwargs, res=residuals, do=grad)
    return dquery, dkey, dvalue


def _kernel(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> Any:
    library = _library()
    shape = query.shape[1], key.shape[1]
    rows, columns = _tile_shape(*shape)

    def layout(x: jax.Array) -> Any:
        # Memory pads features to whole lanes, so features that do not fill them must not be the minor axis.
        fills_lanes = x.shape[-1] % _LANES == 0
        return library.QKVLayout.HEAD_DIM_MINOR if fills_lanes else library.QKVLayout.SEQ_MINOR

    sizes = library.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
        q_layout=layout(query),
        k_layout=layout(key),
        v_layout=layout(value),
    )
    mask = (library.CausalMask if causal else library.FullMask)(shape)
    return library.make_splash_mha_single_device(
        library.MultiHeadMask([mask]),  # all heads share one mask
        block_sizes=sizes,
        save_residuals=True,
    )


FORM: Final = AttentionForm(
    name="splash",
    why="on a TPU the score matrices are most of the memory traffic of a long sequence",
    platforms=("tpu",),
    marks=_MARKS,
    min_columns=512,
    supports=supports,
    forward=forward,
    backward=backward,
)
