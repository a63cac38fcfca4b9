"""The arguments of one attention call, the contract of its forms, and the steps that several of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.forms import Form
from xla_amp.lowering.linalg.contraction import Axes, Operand, contract
from xla_amp.lowering.operand import as_dtype, materialize, opmath

_BATCH = ((0, 1), (0, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """One call of scaled dot product attention."""

    query: Operand
    """[batch, heads, rows, features]."""
    key: Operand
    """[batch, key heads, columns, features]; the number of key heads divides the number of heads."""
    value: Operand
    """[batch, key heads, columns, features of the result]."""
    bias: jax.Array | None = None
    """Added to the scores, broadcast to [batch, heads, rows, columns]; or a boolean mask, true where visible."""
    dropout: Any = 0.0
    """Probability that a weight is dropped, a number or an array."""
    causal: bool = False
    """Row i sees columns 0 to i."""
    given_scale: float | None = None
    """Factor of the scores; None means 1 / sqrt(features)."""
    rng: jax.Array | None = None
    """PRNG key of the dropout mask; None without dropout."""
    platform: str
    partitioned: bool = False
    """Whether XLA splits the program over the devices of a mesh."""

    @property
    def summary(self) -> str:
        """Sizes and dtype, for people."""
        batch, heads, rows, columns = self.shape
        features, groups = self.query.shape[-1], f" in groups of {self.groups}" if self.groups > 1 else ""
        extras = {"causal": self.causal, "mask or bias": self.bias is not None, "dropout": self.rng is not None}
        sizes = f"{batch} x {heads} heads{groups}, {rows} rows, {columns} columns, {features} features, {self.dtype}"
        return ", ".join([sizes, *(name for name, given in extras.items() if given)])

    def objection_to_kernels(self, dtypes: tuple[Any, ...]) -> str | None:
        """What no kernel of a library computes here; None if nothing is in the way."""
        if self.partitioned:
            return "XLA does not split a kernel over a mesh"
        if self.rng is not None:
            return "it has dropout"
        if self.dtype not in map(np.dtype, dtypes):
            return f"not for {self.dtype}"
        return None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the scores: [batch, heads, rows, columns]."""
        batch, heads, rows, _ = self.query.shape
        return batch, heads, rows, self.key.shape[2]

    @property
    def dtype(self) -> np.dtype:
        """dtype of the operands."""
        return np.dtype(self.query.dtype)

    @property
    def groups(self) -> int:
        """Number of heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def scale(self) -> np.ndarray:
        """Factor of the scores, in their dtype."""
        value = float(self.query.shape[-1]) ** -0.5 if self.given_scale is None else self.given_scale
        return np.asarray(value, opmath(self.dtype))

    def contract(self, left: Operand, right: Operand, axes: tuple[Axes, Axes], *, wide: bool = True) -> jax.Array:
        """Contract `axes` for each batch and key head; `wide` returns float32 for half operands."""
        return contract(left, right, axes, _BATCH, platform=self.platform, wide=wide)

    def scores(self, query: Operand, bias: jax.Array | None, first: jax.Array | int, rows: int) -> jax.Array:
        """Scaled and masked scores of `rows` rows from row `first` on, in the opmath dtype.

        `query` has those rows, after `group_rows`; `bias` has those rows of the bias.
        """
        shape = (*self.shape[:2], rows, self.shape[3])
        scores = self.contract(query, self.key, ((3,), (3,))).reshape(shape) * self.scale
        if bias is not None and bias.dtype == jnp.bool_:
            scores = jnp.where(bias, scores, -jnp.inf)
        elif bias is not None:
            scores = scores + as_dtype(bias, scores.dtype)
        if self.causal:
            row, column = (lax.broadcasted_iota(np.int32, shape, axis) for axis in (2, 3))
            scores = jnp.where(column <= row + first, scores, -jnp.inf)
        return scores

    def as_operand(self, weights: jax.Array) -> Operand:
        """A matrix of weights in the operands' dtype, after `group_rows`."""
        return group_rows(as_dtype(weights, self.dtype), self.groups)

    def dropout_mask(self, rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """0 for dropped weights, 1 / (1 - dropout) for the others."""
        keep = jax.random.bernoulli(rng, 1 - self.dropout, shape)
        return jnp.where(keep, as_dtype(1 / (1 - self.dropout), opmath(self.dtype)), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionForm(Form[Attention]):
    """One way to compute attention."""

    forward: Callable[[Attention], tuple[jax.Array, jax.Array]]
    """Output and logarithm of the sum of exponentials."""
    backward: Callable[
        [Attention, Operand, Operand, Operand, bool], tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
    ]
    """From the gradient, output and logarithm: gradients of query, key, value and, if that is wanted, bias."""
    min_columns: int = 0
    """Not used for fewer columns: on a TPU small score matrices stay on chip."""

    def objection(self, call: Attention) -> str | None:
        """Why it does not compute `call`; None if it does."""
        if call.platform in self.platforms and call.shape[3] < self.min_columns:
            return f"fewer than {self.min_columns} columns: a small score matrix costs less"
        return super().objection(call)


def group_rows(x: Operand, groups: int) -> Operand:
    """[batch, heads, rows, ...] as [batch, key heads, groups * rows, ...]: one matrix for the heads of a key head."""
    if groups == 1:
        return x
    batch, heads, rows, features = x.shape
    return materialize(x).reshape(batch, heads // groups, groups * rows, features)


def row_maximum(scores: jax.Array) -> jax.Array:
    """The maximum of each row, 0 where the whole row is masked."""
    maximum = jnp.max(scores, -1, keepdims=True, initial=-jnp.inf)
    return jnp.where(jnp.isneginf(maximum), 0, maximum)


def sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The gradient of a broadcast from `shape`."""
    extra = x.ndim - len(shape)
    x = jnp.sum(x, axis=tuple(range(extra)))
    return jnp.sum(x, axis=tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1), keepdims=True)
