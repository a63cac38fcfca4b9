"""Attention by blocks of rows: memory grows with the number of rows plus columns, not with their product.

Each block sees all its columns, so its softmax is the plain one; the backward pass makes each block's weights again
from the logarithm of its sum (Rabe, Staats: Self-attention Does Not Need O(n^2) Memory, 2021; Dao et al.:
FlashAttention, 2022).  Pure XLA: masks, biases, dropout and shared keys are as in the square form.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.attention.common import Attention, grouped, largest, sum_to
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import as_dtype, materialize, up

BLOCK = 128
"""Rows at a time."""
_SPANS = 4
"""Parts into which the rows of causal attention are cut.  Each leaves out the columns that none of its rows sees, which
saves three eighths of the arithmetic for one more loop in the program each."""

_Sums: TypeAlias = tuple[jax.Array, ...]
"""Gradients of key and value so far."""


def forward(of: Attention) -> tuple[jax.Array, jax.Array]:
    """(output in the operands' dtype, logsumexp)."""
    parts = []
    for span in _spans(of):

        def one(index: jax.Array, span: _Span = span) -> tuple[jax.Array, jax.Array]:
            scores = span.scores(index)
            top = largest(scores)
            weights = jnp.exp(scores - top)
            total = jnp.sum(weights, -1, keepdims=True)
            total = jnp.where(total == 0, 1, total)
            output = of.contract(of.low(span.dropped(weights, index)), span.of.value, ((3,), (2,)))
            output = output.reshape(*scores.shape[:3], -1) / total
            return as_dtype(output, of.dtype), (top + jnp.log(total))[..., 0]

        parts.append(lax.map(one, span.indices))
    outputs, sums = zip(*parts, strict=True)
    return _joined(outputs, of.shape[2]), _joined(sums, of.shape[2])


def backward(
    of: Attention, grad: Operand, output: Operand, logsumexp: Operand, bias_wanted: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of query, key, value and, where wanted, bias."""
    spans = _spans(of)
    gradients = _padded(grad, spans[0].size)
    means = jnp.sum(up(gradients) * up(_padded(output, spans[0].size)), -1, keepdims=True)
    # A row that is not there has an infinite sum, so that its weights are zero.
    sums = as_dtype(_padded(logsumexp, spans[0].size, fill=np.inf), means.dtype)[..., None]
    dkey, dvalue = (jnp.zeros(x.shape, means.dtype) for x in (of.key, of.value))
    dqueries, dbiases = [], []
    for span in spans:

        def one(carry: _Sums, index: jax.Array, span: _Span = span) -> tuple[_Sums, Any]:
            weights = jnp.exp(span.scores(index) - span.rows(sums, index))
            query, rows = (grouped(span.rows(x, index), of.groups) for x in (span.of.query, gradients))
            dvalue = of.contract(of.low(span.dropped(weights, index)), rows, ((2,), (2,)))
            dweights = of.contract(rows, span.of.value, ((3,), (3,))).reshape(weights.shape)
            dscores = weights * (span.dropped(dweights, index) - span.rows(means, index))
            low = of.low(dscores * of.scale)
            dquery = of.contract(low, span.of.key, ((3,), (2,))).reshape(*weights.shape[:3], -1)
            dkey = of.contract(low, query, ((2,), (2,)))
            dbias = sum_to(dscores, span.bias_shape) if bias_wanted and of.bias is not None else None
            return (carry[0] + dkey, carry[1] + dvalue), (as_dtype(dquery, of.dtype), dbias)

        start = tuple(jnp.zeros(x.shape, means.dtype) for x in (span.of.key, span.of.value))
        seen, (dquery, dbias) = lax.scan(one, start, span.indices)
        columns = span.of.shape[3]
        dkey, dvalue = (whole.at[:, :, :columns].add(part) for whole, part in zip((dkey, dvalue), seen, strict=True))
        dqueries.append(dquery)
        dbiases.append(dbias)
    whole = None
    if bias_wanted and of.bias is not None:
        by_rows = of.bias.ndim > 1 and of.bias.shape[-2] > 1
        whole = _joined(dbiases, of.shape[2]) if by_rows else jnp.sum(dbiases[0], 0)
        whole = whole.reshape(of.bias.shape)
    return _joined(dqueries, of.shape[2]), dkey, dvalue, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Span:
    """Blocks of rows that see the same columns."""

    of: Attention
    """With whole blocks of rows, and of the columns only those that are seen."""
    size: int
    """Rows in a block."""
    indices: jax.Array
    """Numbers of the blocks."""

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """Of a block's part of the bias."""
        *lead, rows, columns = self.of.bias.shape  # type: ignore[union-attr]
        return (*lead, self.size if rows > 1 else 1, columns)

    def rows(self, x: Operand, index: jax.Array) -> jax.Array:
        """A block of `x`, along axis 2."""
        return lax.dynamic_slice_in_dim(materialize(x), index * self.size, self.size, 2)

    def scores(self, index: jax.Array) -> jax.Array:
        """Of a block: [batch, heads, size, columns]."""
        bias = self.of.bias
        bias = self.rows(bias, index) if bias is not None and bias.shape[2] > 1 else bias
        query = grouped(self.rows(self.of.query, index), self.of.groups)
        return self.of.scores(query, bias, index * self.size, self.size)

    def dropped(self, weights: jax.Array, index: jax.Array) -> jax.Array:
        """A block's weights, or their gradients, without those that are dropped, the others larger."""
        if self.of.rng is None:
            return weights
        return weights * self.of.kept(jax.random.fold_in(self.of.rng, index), weights.shape)


def _spans(of: Attention) -> list[_Span]:
    rows, columns = of.shape[2:]
    size = min(BLOCK, rows)
    blocks = math.ceil(rows / size)
    query, key, value = _padded(of.query, size), materialize(of.key), materialize(of.value)
    bias = of.bias
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        bias = _padded(bias, size) if bias.shape[2] > 1 else bias
    # A bias is for all columns; only without one may some be left out.
    spans = min(_SPANS, blocks) if of.causal and bias is None else 1
    edges = [round(blocks * i / spans) for i in range(spans + 1)]
    made = []
    for first, last in itertools.pairwise(edges):
        seen = min(columns, last * size) if spans > 1 else columns
        part = dataclasses.replace(of, query=query, key=key[:, :, :seen], value=value[:, :, :seen], bias=bias)
        made.append(_Span(of=part, size=size, indices=jnp.arange(first, last, dtype=np.int32)))
    return made


def _padded(x: Operand, size: int, fill: float = 0) -> jax.Array:
    """`x` with axis 2 a multiple of `size`."""
    x = materialize(x)
    missing = -x.shape[2] % size
    if not missing:
        return x
    widths = [(0, missing if axis == 2 else 0) for axis in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=np.asarray(fill).astype(x.dtype))


def _joined(spans: Any, rows: int) -> jax.Array:
    """Blocks [number, batch, heads, size, ...] of each span to [batch, heads, rows, ...]."""
    x = jnp.moveaxis(jnp.concatenate(spans), 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :rows]
