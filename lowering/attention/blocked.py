"""Attention by blocks of rows: memory is linear in the sequence length.

Each block sees all its columns, so its softmax needs no correction.  The backward pass recomputes each block's weights
from the logarithm of its sum (Rabe, Staats: Self-attention Does Not Need O(n^2) Memory, 2021; Dao et al.:
FlashAttention, 2022).  Pure XLA: masks, biases, dropout and shared key heads are supported as in `full_matrix`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.attention.attention_call import Attention, AttentionForm, group_rows, row_maximum, sum_to
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import as_dtype, materialize, opmath, up

BLOCK = 128
"""Rows in a block."""
_SPANS = 4
"""Parts into which the rows of causal attention are divided.  Each part omits the columns that none of its rows sees.
Four parts save three eighths of the arithmetic; each costs one more loop in the program."""

_Sums: TypeAlias = tuple[jax.Array, jax.Array]
"""Accumulated gradients of key and value."""
_RowGradients: TypeAlias = tuple[jax.Array, jax.Array | None]
"""Gradients of one block of the query and of the bias."""


_LARGE: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"cpu": (1024, 1 << 24), "gpu": (1024, 1 << 30), "tpu": (1024, 1 << 30)}
)
"""Platform -> rows, and bytes of the score matrix in the opmath dtype, from which the rows are divided into blocks.

CPU: beyond both limits blocks are also faster.  GPU and TPU: the limit of memory for one score matrix.
"""


def supports(call: Attention) -> str | None:
    """Why the full matrix serves better."""
    min_rows, min_bytes = _LARGE[call.platform]
    if call.shape[2] >= min_rows and math.prod(call.shape) * opmath(call.dtype).itemsize >= min_bytes:
        return None
    return f"fewer than {min_rows} rows, or a score matrix of less than {min_bytes >> 20} MiB"


def forward(call: Attention) -> tuple[jax.Array, jax.Array]:
    """(output in the operands' dtype, logsumexp)."""
    parts = []
    for span in _spans(call):

        def block(index: jax.Array, span: _Span = span) -> tuple[jax.Array, jax.Array]:
            scores = span.scores(index)
            maximum = row_maximum(scores)
            weights = jnp.exp(scores - maximum)
            total = jnp.sum(weights, -1, keepdims=True)
            total = jnp.where(total == 0, 1, total)
            output = call.contract(call.as_operand(span.drop(weights, index)), span.call.value, ((3,), (2,)))
            output = output.reshape(*scores.shape[:3], -1) / total
            return as_dtype(output, call.dtype), (maximum + jnp.log(total))[..., 0]

        parts.append(lax.map(block, span.indices))
    outputs, sums = zip(*parts, strict=True)
    return _join_blocks(outputs, call.shape[2]), _join_blocks(sums, call.shape[2])


def backward(
    call: Attention, grad: Operand, output: Operand, logsumexp: Operand, needs_bias: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of query, key, value and, with `needs_bias`, bias."""
    spans = _spans(call)
    gradients = _pad_rows(grad, spans[0].size)
    means = jnp.sum(up(gradients) * up(_pad_rows(output, spans[0].size)), -1, keepdims=True)
    # The logarithm of a padding row's sum is infinite, so its weights are zero.
    sums = as_dtype(_pad_rows(logsumexp, spans[0].size, fill=np.inf), means.dtype)[..., None]
    dkey, dvalue = (jnp.zeros(x.shape, means.dtype) for x in (call.key, call.value))
    dqueries: list[jax.Array] = []
    dbiases: list[jax.Array] = []
    for span in spans:

        def block(carry: _Sums, index: jax.Array, span: _Span = span) -> tuple[_Sums, _RowGradients]:
            weights = jnp.exp(span.scores(index) - span.rows(sums, index))
            query, rows = (group_rows(span.rows(x, index), call.groups) for x in (span.call.query, gradients))
            dvalue = call.contract(call.as_operand(span.drop(weights, index)), rows, ((2,), (2,)))
            dweights = call.contract(rows, span.call.value, ((3,), (3,))).reshape(weights.shape)
            dscores = weights * (span.drop(dweights, index) - span.rows(means, index))
            low = call.as_operand(dscores * call.scale)
            dquery = call.contract(low, span.call.key, ((3,), (2,))).reshape(*weights.shape[:3], -1)
            dkey = call.contract(low, query, ((2,), (2,)))
            dbias = sum_to(dscores, span.bias_shape) if needs_bias and call.bias is not None else None
            return (carry[0] + dkey, carry[1] + dvalue), (as_dtype(dquery, call.dtype), dbias)

        start = (jnp.zeros(span.call.key.shape, means.dtype), jnp.zeros(span.call.value.shape, means.dtype))
        totals, (dquery, dbias) = lax.scan(block, start, span.indices)
        columns = span.call.shape[3]
        dkey, dvalue = (x.at[:, :, :columns].add(part) for x, part in zip((dkey, dvalue), totals, strict=True))
        dqueries.append(dquery)
        if dbias is not None:
            dbiases.append(dbias)
    bias_gradient = None
    if needs_bias and call.bias is not None:
        has_rows = call.bias.ndim > 1 and call.bias.shape[-2] > 1
        bias_gradient = _join_blocks(dbiases, call.shape[2]) if has_rows else jnp.sum(dbiases[0], 0)
        bias_gradient = bias_gradient.reshape(call.bias.shape)
    return _join_blocks(dqueries, call.shape[2]), dkey, dvalue, bias_gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Span:
    """Blocks of rows that see the same columns."""

    call: Attention
    """The call, with rows padded to whole blocks and without the columns that no row of the span sees."""
    size: int
    """Rows in a block."""
    indices: jax.Array
    """Numbers of the blocks."""

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """Shape of one block's part of the bias."""
        *lead, rows, columns = self.call.bias.shape  # type: ignore[union-attr]  # called only with a bias
        return (*lead, self.size if rows > 1 else 1, columns)

    def rows(self, x: Operand, index: jax.Array) -> jax.Array:
        """Block `index` of `x`, along axis 2."""
        return lax.dynamic_slice_in_dim(materialize(x), index * self.size, self.size, 2)

    def scores(self, index: jax.Array) -> jax.Array:
        """Scores of block `index`: [batch, heads, size, columns]."""
        bias = self.call.bias
        bias = self.rows(bias, index) if bias is not None and bias.shape[2] > 1 else bias
        query = group_rows(self.rows(self.call.query, index), self.call.groups)
        return self.call.scores(query, bias, index * self.size, self.size)

    def drop(self, weights: jax.Array, index: jax.Array) -> jax.Array:
        """Apply dropout to a block's weights, or to their gradients."""
        if self.call.rng is None:
            return weights
        return weights * self.call.dropout_mask(jax.random.fold_in(self.call.rng, index), weights.shape)


def _spans(call: Attention) -> list[_Span]:
    rows, columns = call.shape[2:]
    size = min(BLOCK, rows)
    blocks = math.ceil(rows / size)
    query, key, value = _pad_rows(call.query, size), materialize(call.key), materialize(call.value)
    bias = call.bias
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        bias = _pad_rows(bias, size) if bias.shape[2] > 1 else bias
    # The bias covers all columns, so with a bias none are omitted.
    count = min(_SPANS, blocks) if call.causal and bias is None else 1
    edges = [round(blocks * i / count) for i in range(count + 1)]
    spans = []
    for first, last in itertools.pairwise(edges):
        visible = min(columns, last * size) if count > 1 else columns
        part = dataclasses.replace(call, query=query, key=key[:, :, :visible], value=value[:, :, :visible], bias=bias)
        spans.append(_Span(call=part, size=size, indices=jnp.arange(first, last, dtype=np.int32)))
    return spans


def _pad_rows(x: Operand, size: int, fill: float = 0) -> jax.Array:
    """`x` with axis 2 padded to a multiple of `size`."""
    x = materialize(x)
    missing = -x.shape[2] % size
    if not missing:
        return x
    widths = [(0, missing if axis == 2 else 0) for axis in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=np.asarray(fill).astype(x.dtype))


def _join_blocks(spans: Sequence[jax.Array], rows: int) -> jax.Array:
    """Blocks [number, batch, heads, size, ...] of each span to [batch, heads, rows, ...]."""
    x = jnp.moveaxis(jnp.concatenate(spans), 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :rows]


FORM: Final = AttentionForm(
    name="blocked",
    why="memory linear in the length, where score matrices exceed the caches (CPU) or take GiB (GPU, TPU)",
    supports=supports,
    forward=forward,
    backward=backward,
)
