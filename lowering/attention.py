"""Scaled dot product attention as one operation, forward and backward, and the fused layers of inference.

Scores and softmax are float32 for half operands, whose products run in the form of `contraction.contract`; the weights
are rounded to the operands' type for the second product, as fused attention does on accelerators.  A row in which
everything is masked gives zeros.

The backward pass recomputes the weights by the forward pass's own expressions.  In a program that holds both, XLA
finds them equal and computes them once; in one that does not, no square matrix had to be kept.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.contraction import contract
from xla_amp.lowering.operand import Permuted, as_dtype, up
from xla_amp.lowering.registry import register

Operand = jax.Array | Permuted
_BATCH = ((0, 1), (0, 1))


def _grouped(x: Operand, groups: int) -> Operand:
    """[batch, heads, rows, features] with the rows of each `groups` heads, which share a key head, in one."""
    if groups == 1:
        return x
    x = x.materialize() if isinstance(x, Permuted) else x
    batch, heads, rows, features = x.shape
    return x.reshape(batch, heads // groups, groups * rows, features)


class _Attention:
    """The quantities that forward and backward share.

    Args:
        query: [batch, heads, rows, features].
        key: [batch, heads or a divisor, columns, features].
        bias: added to the scores, broadcast to [batch, heads, rows, columns]; or a mask that is true for what is seen;
            or ``None``.
        causal: row i sees columns 0 to i.
        scale: factor of the scores; ``None`` is 1 / sqrt(features).
    """

    def __init__(
        self, query: Operand, key: Operand, bias: jax.Array | None, causal: bool, scale: float | None, platform: str
    ) -> None:
        self.shape = (*query.shape[:3], key.shape[2])
        self.groups = query.shape[1] // key.shape[1]
        self.scale = float(query.shape[-1]) ** -0.5 if scale is None else scale
        self.dtype, self.platform = query.dtype, platform
        self.query, self.key = _grouped(query, self.groups), key
        scores = self.contract(self.query, key, ((3,), (3,))).reshape(self.shape)
        scores = scores * np.asarray(self.scale, scores.dtype)
        if bias is not None and bias.dtype == jnp.bool_:
            scores = jnp.where(bias, scores, -jnp.inf)
        elif bias is not None:
            scores = scores + as_dtype(bias, scores.dtype)
        if causal:
            row, column = (lax.broadcasted_iota(np.int32, self.shape, axis) for axis in (2, 3))
            scores = jnp.where(column <= row, scores, -jnp.inf)
        top = jnp.max(scores, -1, keepdims=True, initial=-jnp.inf)
        self.top = jnp.where(jnp.isneginf(top), 0, top)
        self.exponentials = jnp.exp(scores - self.top)
        total = jnp.sum(self.exponentials, -1, keepdims=True)
        self.total = jnp.where(total == 0, 1, total)

    def contract(self, left: Operand, right: Operand, axes: Any) -> jax.Array:
        """A product over `axes` for each batch and key head, in float32 for half operands."""
        return contract(left, right, axes, _BATCH, platform=self.platform, wide=True)

    def low(self, x: jax.Array) -> jax.Array:
        """A square matrix of the operands' dtype, grouped for a product."""
        x = as_dtype(x, self.dtype)
        return x.reshape(x.shape[0], x.shape[1] // self.groups, self.groups * x.shape[2], x.shape[3])

    def kept(self, rng: Any, dropout: float) -> jax.Array:
        """0 for dropped weights, 1 / (1 - dropout) for the others."""
        keep = jax.random.bernoulli(rng, 1 - dropout, self.shape)
        return jnp.where(keep, np.asarray(1 / (1 - dropout), self.total.dtype), 0)


@register("_scaled_dot_product_fused_attention_overrideable", permuted=True)
def attention(
    query: Operand,
    key: Operand,
    value: Operand,
    bias: Operand | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    rng: Any = None,
    platform: str,
) -> tuple[jax.Array | None, ...]:
    """(output, logsumexp, four of no use here, the random key as int64[2] when `dropout` is used, two of no use)."""
    bias = bias.materialize() if isinstance(bias, Permuted) else bias
    of = _Attention(query, key, bias, causal, scale, platform)
    weights, seed = of.exponentials, None
    if dropout > 0:
        weights = weights * of.kept(rng, dropout)
        seed = as_dtype(jax.random.key_data(rng), np.int64)
    output = of.contract(of.low(weights), value, ((3,), (2,))).reshape(*of.shape[:3], value.shape[-1]) / of.total
    return output, (of.top + jnp.log(of.total))[..., 0], None, None, None, None, seed, None, None


@register("_scaled_dot_product_fused_attention_overrideable_backward", permuted=True)
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
    dropout: float,
    causal: bool,
    seed: Operand | None,
    offset: None,
    *,
    scale: float | None = None,
    platform: str,
) -> tuple[jax.Array | None, ...]:
    """Gradients of query, key, value and bias."""
    result = output.materialize() if isinstance(output, Permuted) else output
    seed, bias = (x.materialize() if isinstance(x, Permuted) else x for x in (seed, bias))
    of = _Attention(query, key, bias, causal, scale, platform)
    kept = None
    if dropout > 0:
        kept = of.kept(jax.random.wrap_key_data(as_dtype(seed, np.uint32), impl="threefry2x32"), dropout)
    # 1 / total goes into the gradient, which is smaller than the weights.
    scaled_grad, low_grad = _divided(grad, of.total, of.dtype)
    grouped_grad = _grouped(low_grad, of.groups)
    weights = of.exponentials if kept is None else of.exponentials * kept
    dvalue = of.contract(of.low(weights), grouped_grad, ((2,), (2,)))
    dweights = of.contract(grouped_grad, value, ((3,), (3,))).reshape(of.shape)
    dweights = dweights if kept is None else dweights * kept
    mean = jnp.sum(scaled_grad * up(result), -1, keepdims=True)
    dscores = of.exponentials * (dweights - mean)
    low = of.low(dscores * np.asarray(of.scale, dscores.dtype))
    dquery = of.contract(low, key, ((3,), (2,))).reshape(query.shape)
    dkey = of.contract(low, of.query, ((2,), (2,)))
    dbias = None
    if wanted[3] and bias is not None:
        dbias = _sum_to(dscores, bias.shape)
    return dquery if wanted[0] else None, dkey if wanted[1] else None, dvalue if wanted[2] else None, dbias


def _divided(grad: Operand, total: jax.Array, dtype: Any) -> tuple[jax.Array, Operand]:
    """``grad / total`` in opmath and in `dtype`.

    The second keeps a pending transpose of `grad` pending: XLA:CPU has no low kernel for a dot whose operand it has
    transposed itself.
    """
    if not isinstance(grad, Permuted):
        quotient = up(grad) / total
        return quotient, as_dtype(quotient, dtype)
    back = tuple(int(axis) for axis in np.argsort(grad.permutation))
    base = up(grad.base) / lax.transpose(total, back)
    return Permuted(base, grad.permutation).materialize(), Permuted(as_dtype(base, dtype), grad.permutation)


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The gradient of a broadcast from `shape`."""
    extra = x.ndim - len(shape)
    x = jnp.sum(x, axis=tuple(range(extra)))
    return jnp.sum(x, axis=tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1), keepdims=True)


# -- the fused layers that nn.MultiheadAttention and nn.TransformerEncoderLayer call in inference ----------------------

_SOURCE_MASK, _PADDING_MASK = 0, 1
"""`mask_type`: [rows, columns] or [batch * heads, ...], and [batch, columns]; 2 is a merged [batch, heads, ...]."""


def _affine(x: jax.Array, weight: jax.Array, bias: jax.Array, platform: str) -> jax.Array:
    """x W^T + b over the last axis, rounded to the dtype of x."""
    flat = contract(x.reshape(-1, x.shape[-1]), weight, ((1,), (1,)), platform=platform, wide=True)
    return as_dtype(flat + as_dtype(bias, flat.dtype), x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _mask_bias(mask: jax.Array, mask_type: int | None, batch: int, heads: int) -> jax.Array:
    """A boolean mask (here true is what is not seen) or an additive one, as `_Attention` takes it."""
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
    weights, biases = jnp.split(qkv_weight, 3), jnp.split(qkv_bias, 3)

    def heads(x: jax.Array, part: int) -> jax.Array:
        projected = _affine(x, weights[part], biases[part], platform)
        return projected.reshape(*x.shape[:2], num_head, embed_dim // num_head).transpose(0, 2, 1, 3)

    q, k, v = (heads(x, part) for part, x in enumerate((query, key, value)))
    bias = None if mask is None else _mask_bias(mask, mask_type, query.shape[0], num_head)
    of = _Attention(q, k, bias, False, None, platform)
    attended = of.contract(of.low(of.exponentials), v, ((3,), (2,))) / of.total
    joined = as_dtype(attended, query.dtype).transpose(0, 2, 1, 3).reshape(query.shape)
    output = _affine(joined, proj_weight, proj_bias, platform)
    if not need_weights:
        return output, None
    shown = of.exponentials / of.total
    return output, jnp.mean(shown, 1) if average_attn_weights else shown


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    wide = up(x)
    centered = wide - jnp.mean(wide, -1, keepdims=True)
    normal = centered * lax.rsqrt(jnp.mean(centered * centered, -1, keepdims=True) + np.asarray(eps, wide.dtype))
    return as_dtype(normal * up(weight) + up(bias), x.dtype)


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
    """One layer of a transformer encoder without dropout."""

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
        return _layer_norm(x, norm_weight_1, norm_bias_1, eps)

    def second(x: jax.Array) -> jax.Array:
        return _layer_norm(x, norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(first(src))
        return x + feed_forward(second(x))
    x = first(src + attend(src))
    return second(x + feed_forward(x))
