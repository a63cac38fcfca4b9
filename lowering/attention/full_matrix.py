"""Attention that computes the whole score matrix at once.

Scores and softmax are float32 for half operands, whose products run in the form of `contraction.contract`.  The
weights are rounded to the operands' dtype for the second product, as fused attention does on accelerators.  A row
whose columns are all masked gives zeros.

The backward pass recomputes the weights with the forward pass's own expressions.  In a program with both passes, XLA
finds them equal and computes them once.  In a program with one pass, no score matrix has to be kept between them.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.attention.attention_call import Attention, AttentionForm, group_rows, row_maximum, sum_to
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import Permuted, as_dtype, materialize, stored, up

_TOKEN_MAJOR = (0, 2, 1, 3)
"""[batch, heads, rows, features] to [batch, rows, heads, features], and back."""


class Exponentials:
    """The softmax before its division: exponentials of the scores and their sum in each row."""

    def __init__(self, call: Attention) -> None:
        self.query = group_rows(call.query, call.groups)
        scores = call.scores(self.query, call.bias, 0, call.shape[2])
        self.maximum = row_maximum(scores)
        self.values = jnp.exp(scores - self.maximum)
        total = jnp.sum(self.values, -1, keepdims=True)
        self.total = jnp.where(total == 0, 1, total)


def forward(call: Attention) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp)."""
    exponentials = Exponentials(call)
    weights = exponentials.values
    if call.rng is not None:
        weights = weights * call.dropout_mask(call.rng, call.shape)
    product = call.contract(call.as_operand(weights), call.value, ((3,), (2,)))
    output = product.reshape(*call.shape[:3], call.value.shape[-1]) / exponentials.total
    return _token_major(output, call), (exponentials.maximum + jnp.log(exponentials.total))[..., 0]


def backward(
    call: Attention, grad: Operand, output: Operand, logsumexp: Operand, needs_bias: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of query, key, value and, with `needs_bias`, bias."""
    exponentials = Exponentials(call)
    mask = None if call.rng is None else call.dropout_mask(call.rng, call.shape)
    # Divide the gradient by the row sums: it is smaller than the weights.
    scaled_grad, low_grad = _divide(grad, exponentials.total, call.dtype)
    grouped_grad = group_rows(low_grad, call.groups)
    weights = exponentials.values if mask is None else exponentials.values * mask
    dvalue = call.contract(call.as_operand(weights), grouped_grad, ((2,), (2,)), wide=False)
    dweights = call.contract(grouped_grad, call.value, ((3,), (3,))).reshape(call.shape)
    dweights = dweights if mask is None else dweights * mask
    mean = jnp.sum(scaled_grad * up(stored(materialize(output), call.platform)), -1, keepdims=True)
    dscores = exponentials.values * (dweights - mean)
    low = call.as_operand(dscores * call.scale)
    dquery = call.contract(low, call.key, ((3,), (2,)), wide=False).reshape(call.query.shape)
    dkey = call.contract(low, exponentials.query, ((2,), (2,)), wide=False)
    dbias = sum_to(dscores, call.bias.shape) if needs_bias and call.bias is not None else None
    return _token_major(dquery, call), _token_major(dkey, call), _token_major(dvalue, call), dbias


def _token_major(x: jax.Array, call: Attention) -> jax.Array:
    """On a TPU, round `x` and copy it once into the memory order [batch, rows, heads, features].

    The readers merge heads with features, and batch with rows.  Without the copy XLA:TPU keeps the order of the
    product, rows last, and copies twice for each reader (weight gradient, bias gradient, data gradient).
    """
    if call.platform != "tpu":
        return x
    batch, heads, rows, features = x.shape
    tokens = lax.transpose(as_dtype(x, call.dtype), _TOKEN_MAJOR).reshape(batch, rows, heads * features)
    tokens = lax.optimization_barrier(tokens)
    return lax.transpose(tokens.reshape(batch, rows, heads, features), _TOKEN_MAJOR)


def _divide(grad: Operand, total: jax.Array, dtype: np.dtype) -> tuple[jax.Array, Operand]:
    """``grad / total``, in the opmath dtype and in `dtype`.

    The second result keeps a deferred transpose of `grad` deferred: XLA:CPU has no low-precision kernel for a dot
    whose operand it has transposed itself.
    """
    if not isinstance(grad, Permuted):
        quotient = up(grad) / total
        return quotient, as_dtype(quotient, dtype)
    inverse = tuple(int(axis) for axis in np.argsort(grad.permutation))
    base = up(grad.base) / lax.transpose(total, inverse)
    return Permuted(base, grad.permutation).materialize(), Permuted(as_dtype(base, dtype), grad.permutation)


FORM: Final = AttentionForm(
    name="full matrix",
    why="fewest operations, and a program with both passes computes the weights once",
    forward=forward,
    backward=backward,
)
