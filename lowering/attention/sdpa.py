"""Scaled dot product attention as one operation, forward and backward, in the fastest form for its platform.

`forms_of` has the forms; lowering/README.md has the measurements.  Forward and backward choose the form by the
same properties of the call, so both draw the same dropout mask.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from xla_amp.lowering import forms
from xla_amp.lowering.attention import blocked, full_matrix
from xla_amp.lowering.attention.attention_call import Attention, AttentionForm
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import Permuted, as_dtype, materialize
from xla_amp.lowering.registry import register


def forms_of(platform: str) -> tuple[AttentionForm, ...]:
    """The forms in order of preference: the first without an objection computes the call.

    Kernels are loaded for their platform alone.
    """
    if platform == "tpu":
        from xla_amp.lowering.attention import splash

        return splash.FORM, blocked.FORM, full_matrix.FORM
    if platform == "gpu":
        from xla_amp.lowering.attention import cudnn

        return cudnn.FORM, blocked.FORM, full_matrix.FORM
    return blocked.FORM, full_matrix.FORM


def form_of(call: Attention) -> AttentionForm:
    """The form in which a call is computed."""
    return forms.choose("scaled_dot_product_attention", forms_of(call.platform), call)


def _drops(dropout: Any) -> bool:
    """Whether weights may be dropped; a probability that has differed between steps is an array."""
    return not isinstance(dropout, (int, float)) or dropout > 0


@register("_scaled_dot_product_fused_attention_overrideable", takes=(Permuted,), dynamic=("dropout_p",))
def attention(
    query: Operand,
    key: Operand,
    value: Operand,
    bias: Operand | None = None,
    dropout: Any = 0.0,
    causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    rng: jax.Array | None = None,
    platform: str,
    partitioned: bool = False,
) -> tuple[jax.Array | None, ...]:
    """(output, logsumexp, four unused results, the PRNG key as int64[2] if `dropout` > 0, two unused results)."""
    call = Attention(
        query=query,
        key=key,
        value=value,
        bias=None if bias is None else materialize(bias),
        dropout=dropout,
        causal=causal,
        given_scale=scale,
        rng=rng if _drops(dropout) else None,
        platform=platform,
        partitioned=partitioned,
    )
    output, logsumexp = form_of(call).forward(call)
    seed = as_dtype(jax.random.key_data(call.rng), np.int64) if call.rng is not None else None
    return output, logsumexp, None, None, None, None, seed, None, None


@register("_scaled_dot_product_fused_attention_overrideable_backward", takes=(Permuted,), dynamic=("dropout_p",))
def attention_backward(
    grad: Operand,
    query: Operand,
    key: Operand,
    value: Operand,
    bias: Operand | None,
    wanted: list[bool],
    output: Operand,
    logsumexp: Operand,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout: Any,
    causal: bool,
    seed: Operand | None,
    offset: None,
    *,
    scale: float | None = None,
    platform: str,
    partitioned: bool = False,
) -> tuple[jax.Array | None, ...]:
    """Gradients of query, key, value and bias, each None unless `wanted`."""
    rng = None
    if _drops(dropout) and seed is not None:
        rng = jax.random.wrap_key_data(as_dtype(materialize(seed), np.uint32), impl="threefry2x32")
    call = Attention(
        query=query,
        key=key,
        value=value,
        bias=None if bias is None else materialize(bias),
        dropout=dropout,
        causal=causal,
        given_scale=scale,
        rng=rng,
        platform=platform,
        partitioned=partitioned,
    )
    gradients = form_of(call).backward(call, grad, output, logsumexp, wanted[3])
    return tuple(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))


@register("_scaled_dot_product_flash_attention_for_cpu", takes=(Permuted,))
def attention_of_cpu(
    query: Operand,
    key: Operand,
    value: Operand,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Operand | None = None,
    scale: float | None = None,
    platform: str,
    partitioned: bool = False,
) -> tuple[jax.Array | None, ...]:
    """(output, logsumexp) of the operation that torch's CPU computes attention with, without dropout."""
    given = query, key, value, attn_mask, 0.0, causal
    return attention(*given, scale=scale, platform=platform, partitioned=partitioned)[:2]


@register("_scaled_dot_product_flash_attention_for_cpu_backward", takes=(Permuted,))
def attention_of_cpu_backward(
    grad: Operand,
    query: Operand,
    key: Operand,
    value: Operand,
    output: Operand,
    logsumexp: Operand,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Operand | None = None,
    scale: float | None = None,
    platform: str,
    partitioned: bool = False,
) -> tuple[jax.Array | None, ...]:
    """Gradients of query, key and value."""
    operands, wanted = (grad, query, key, value, attn_mask), [True, True, True, False]
    saved, options = (output, logsumexp, None, None), (0, 0, 0.0, causal, None, None)
    given = *operands, wanted, *saved, *options
    return attention_backward(*given, scale=scale, platform=platform, partitioned=partitioned)[:3]
