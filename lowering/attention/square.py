"""Attention with the whole matrix of weights at once.

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

from xla_amp.lowering.attention.common import Attention, grouped, largest, sum_to
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import Permuted, as_dtype, materialize, stored, up

_TO_TOKENS = (0, 2, 1, 3)
"""[batch, heads, rows, features] to [batch, rows, heads, features], and back."""


class Weights:
    """The quantities that forward and backward share."""

    def __init__(self, of: Attention) -> None:
        self.query = grouped(of.query, of.groups)
        scores = of.scores(self.query, of.bias, 0, of.shape[2])
        self.top = largest(scores)
        self.exponentials = jnp.exp(scores - self.top)
        total = jnp.sum(self.exponentials, -1, keepdims=True)
        self.total = jnp.where(total == 0, 1, total)


def forward(of: Attention) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp)."""
    w = Weights(of)
    weights = w.exponentials if of.rng is None else w.exponentials * of.kept(of.rng, of.shape)
    product = of.contract(of.low(weights), of.value, ((3,), (2,)))
    output = product.reshape(*of.shape[:3], of.value.shape[-1]) / w.total
    return _by_tokens(output, of), (w.top + jnp.log(w.total))[..., 0]


def backward(
    of: Attention, grad: Operand, output: Operand, logsumexp: Operand, bias_wanted: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of query, key, value and, where wanted, bias."""
    w = Weights(of)
    kept = None if of.rng is None else of.kept(of.rng, of.shape)
    # 1 / total goes into the gradient, which is smaller than the weights.
    scaled_grad, low_grad = _divided(grad, w.total, of.dtype)
    grouped_grad = grouped(low_grad, of.groups)
    weights = w.exponentials if kept is None else w.exponentials * kept
    dvalue = of.contract(of.low(weights), grouped_grad, ((2,), (2,)), wide=False)
    dweights = of.contract(grouped_grad, of.value, ((3,), (3,))).reshape(of.shape)
    dweights = dweights if kept is None else dweights * kept
    mean = jnp.sum(scaled_grad * up(stored(materialize(output), of.platform)), -1, keepdims=True)
    dscores = w.exponentials * (dweights - mean)
    low = of.low(dscores * of.scale)
    dquery = of.contract(low, of.key, ((3,), (2,)), wide=False).reshape(of.query.shape)
    dkey = of.contract(low, w.query, ((2,), (2,)), wide=False)
    dbias = sum_to(dscores, of.bias.shape) if bias_wanted and of.bias is not None else None
    return _by_tokens(dquery, of), _by_tokens(dkey, of), _by_tokens(dvalue, of), dbias


def _by_tokens(x: jax.Array, of: Attention) -> jax.Array:
    """`x`, on a TPU rounded and copied once into the order of tokens.

    What follows merges heads and features, and batch and tokens.  XLA:TPU else keeps the order in which the product
    came, tokens last, and copies twice for each of its readers (weight gradient, bias gradient, data gradient).
    """
    if of.platform != "tpu":
        return x
    batch, heads, rows, features = x.shape
    tokens = lax.transpose(as_dtype(x, of.dtype), _TO_TOKENS).reshape(batch, rows, heads * features)
    return lax.transpose(lax.optimization_barrier(tokens).reshape(batch, rows, heads, features), _TO_TOKENS)


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
