"""Fused inference layers of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xla_amp.lowering.attention.attention_call import Attention
from xla_amp.lowering.attention.full_matrix import Exponentials
from xla_amp.lowering.linalg.contraction import contract
from xla_amp.lowering.nn.normalization import native_layer_norm
from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register

_SOURCE_MASK, _PADDING_MASK = 0, 1
"""Values of `mask_type`: [rows, columns] or [batch * heads, ...]; [batch, columns].  2 is both: [batch, heads, ...]."""


def _affine(x: jax.Array, weight: jax.Array, bias: jax.Array, platform: str) -> jax.Array:
    """x W^T + b over the last axis, rounded to the dtype of x."""
    flat = contract(x.reshape(-1, x.shape[-1]), weight, ((1,), (1,)), platform=platform, wide=True)
    return as_dtype(flat + as_dtype(bias, flat.dtype), x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _mask_bias(mask: jax.Array, mask_type: int | None, batch: int, heads: int) -> jax.Array:
    """The bias of `Attention` for a boolean mask, which is true where hidden, or for an additive mask."""
    bias = ~mask if mask.dtype == jnp.bool_ else mask
    if mask_type == _PADDING_MASK:
        return bias[:, None, None, :]
    return bias.reshape(batch, heads, *bias.shape[-2:]) if bias.ndim == 3 else bias


@register("_native_multi_head_attention")
def multi_head_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    embed_dim: int,
    num_head: int,
    qkv_weight: jax.Array,
    qkv_bias: jax.Array,
    proj_weight: jax.Array,
    proj_bias: jax.Array,
    mask: jax.Array | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
    *,
    platform: str,
) -> tuple[jax.Array, jax.Array | None]:
    """(output [batch, rows, embed_dim], weights [batch, rows, columns], per head unless averaged)."""
    parts, biases = jnp.split(qkv_weight, 3), jnp.split(qkv_bias, 3)

    def heads(x: jax.Array, part: int) -> jax.Array:
        projected = _affine(x, parts[part], biases[part], platform)
        return projected.reshape(*x.shape[:2], num_head, embed_dim // num_head).transpose(0, 2, 1, 3)

    q, k, v = (heads(x, part) for part, x in enumerate((query, key, value)))
    bias = None if mask is None else _mask_bias(mask, mask_type, query.shape[0], num_head)
    call = Attention(query=q, key=k, value=v, bias=bias, platform=platform)
    exponentials = Exponentials(call)
    attended = call.contract(call.as_operand(exponentials.values), v, ((3,), (2,))) / exponentials.total
    joined = as_dtype(attended, query.dtype).transpose(0, 2, 1, 3).reshape(query.shape)
    output = _affine(joined, proj_weight, proj_bias, platform)
    if not need_weights:
        return output, None
    weights = exponentials.values / exponentials.total
    return output, jnp.mean(weights, 1) if average_attn_weights else weights


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float, platform: str) -> jax.Array:
    return as_dtype(native_layer_norm(x, x.shape[-1:], weight, bias, eps, platform=platform)[0], x.dtype)


@register("_transformer_encoder_layer_fwd")
def encoder_layer(
    src: jax.Array,
    embed_dim: int,
    num_heads: int,
    qkv_weight: jax.Array,
    qkv_bias: jax.Array,
    proj_weight: jax.Array,
    proj_bias: jax.Array,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: jax.Array,
    norm_bias_1: jax.Array,
    norm_weight_2: jax.Array,
    norm_bias_2: jax.Array,
    ffn_weight_1: jax.Array,
    ffn_bias_1: jax.Array,
    ffn_weight_2: jax.Array,
    ffn_bias_2: jax.Array,
    mask: jax.Array | None = None,
    mask_type: int | None = None,
    *,
    platform: str,
) -> jax.Array:
    """One transformer encoder layer, without dropout."""

    def attend(x: jax.Array) -> jax.Array:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return multi_head_attention(
            x, x, x, embed_dim, num_heads, *projections, mask, False, False, mask_type, platform=platform
        )[0]

    def feed_forward(x: jax.Array) -> jax.Array:
        wide = up(_affine(x, ffn_weight_1, ffn_bias_1, platform))
        active = jax.nn.gelu(wide, approximate=False) if use_gelu else jax.nn.relu(wide)
        return _affine(as_dtype(active, x.dtype), ffn_weight_2, ffn_bias_2, platform)

    def first(x: jax.Array) -> jax.Array:
        return _layer_norm(x, norm_weight_1, norm_bias_1, eps, platform)

    def second(x: jax.Array) -> jax.Array:
        return _layer_norm(x, norm_weight_2, norm_bias_2, eps, platform)

    if norm_first:
        x = src + attend(first(src))
        return x + feed_forward(second(x))
    x = first(src + attend(src))
    return second(x + feed_forward(x))
