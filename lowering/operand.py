"""Helpers that all lowerings share: dtypes, axes, deferred operands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_MANY_ROWS = 1024
"""Rows from which on a sum over them has two stages on GPU."""
_LEAST_PARTS = 16
"""Parts of the rows, a power of two, in which they are summed first; with fewer the sum has one stage."""
_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def is_half(dtype: Any) -> bool:
    """Whether `dtype` is bfloat16 or float16."""
    return np.dtype(dtype) in _HALF


def opmath(dtype: Any) -> np.dtype:
    """The dtype in which torch's kernels compute on `dtype`: float32 for the half types, else `dtype` itself.

    Source: ``at::opmath_type`` (ATen/OpMathType.h).
    """
    return np.dtype(np.float32) if is_half(dtype) else np.dtype(dtype)


def as_dtype(x: Any, dtype: Any) -> jax.Array:
    """`x` (array or Python number) as an array of `dtype`."""
    if getattr(x, "dtype", None) == np.bool_:  # of a converted boolean XLA takes infinity times False for 0
        return jnp.where(x, jnp.ones((), dtype), jnp.zeros((), dtype))
    return lax.convert_element_type(x, dtype) if hasattr(x, "dtype") else jnp.asarray(x, dtype)


def rounded_to_half(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 `x`, still in float32, rounded to the nearest value that `dtype` (bfloat16 or float16) has.

    XLA could remove a pair of conversions.
    """
    limits = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=limits.nmant)
    if dtype != np.float16:
        return rounded
    # reduce_precision with float16's own 5 exponent bits would flush its subnormals, where small gradients live.  They
    # are the multiples of 2**-24.
    subnormal = lax.round(x * np.float32(2.0**24), lax.RoundingMethod.TO_NEAREST_EVEN) * np.float32(2.0**-24)
    rounded = jnp.where(abs(x) < float(limits.smallest_normal), subnormal, rounded)
    return jnp.where(abs(rounded) > float(limits.max), jnp.copysign(jnp.inf, x), rounded)


def up(x: jax.Array) -> jax.Array:
    """`x` in its opmath dtype."""
    return as_dtype(x, opmath(x.dtype))


def stored(x: jax.Array | Biased, platform: str) -> jax.Array:
    """`x`, a residual of the forward pass, behind a barrier if it has a half dtype.

    Both passes convert it to float32.  On an accelerator XLA merges the two conversions, moves the remaining one into
    the product that makes `x`, and keeps float32: twice the memory and traffic.  The barrier keeps them apart.
    """
    if isinstance(x, Biased):
        return dataclasses.replace(x, product=stored(x.product, platform)).materialize()
    return lax.optimization_barrier(x) if platform != "cpu" and is_half(x.dtype) else x


def written(x: jax.Array, dtype: Any, platform: str) -> jax.Array:
    """`x` in `dtype`; on GPU a half result is written to memory as such.

    Several kernels read it.  Without the barrier XLA gives them a second copy in float32, or computes it in each.
    """
    return lax.optimization_barrier(as_dtype(x, dtype)) if platform == "gpu" and is_half(dtype) else as_dtype(x, dtype)


def sums_of_rows(arrays: Sequence[jax.Array], leading: int, platform: str) -> list[jax.Array]:
    """The sum of each of `arrays`, which have one shape and dtype, over its first `leading` axes.

    On GPU the sums are of one pass, in two stages: XLA gives a sum over the rows of a matrix one block for each 32
    columns, which is too few for the chip with some thousand rows, and does not fuse into it what computes the matrix.
    """
    rows, rest = (math.prod(arrays[0].shape[:leading]), arrays[0].shape[leading:]) if arrays else (0, ())
    parts = min(rows & -rows, 1 << (rows.bit_length() // 2))
    if platform == "gpu" and rest and rows >= _MANY_ROWS and parts >= _LEAST_PARTS:
        zeros = [jnp.zeros((), x.dtype) for x in arrays]
        split = [x.reshape(parts, rows // parts, *rest) for x in arrays]
        arrays, leading = lax.optimization_barrier(lax.reduce(split, zeros, _add_each, (1,))), 1
    return [jnp.sum(x, axis=tuple(range(leading))) for x in arrays]


def _add_each(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(left, right, strict=True)]


def axes(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """torch's ``dim`` argument as non-negative axes; ``None`` and ``[]`` mean all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    if ndim == 0:
        return ()
    return tuple(d % ndim for d in ([dim] if isinstance(dim, int) else dim))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Permuted:
    """A deferred transpose of `base` as an operand.

    Contractions fold it into their dimension numbers: on XLA:CPU a bf16 dot whose transpose is only folded later by
    the compiler has already missed the fast kernel (lowering/README.md).
    """

    base: jax.Array
    permutation: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Axis ``i`` of the operand is axis ``permutation[i]`` of `base`, as in ``numpy.transpose``."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape[axis] for axis in self.permutation)

    @property
    def ndim(self) -> int:
        return self.base.ndim

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.base.dtype)

    def materialize(self) -> jax.Array:
        """The transposed array."""
        return lax.transpose(self.base, self.permutation)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneHot:
    """A deferred operand of zeros with one value in each line along an axis.

    A sum along that axis needs no pass over it.  For the gradient of a loss over a vocabulary this saves 6 % of the
    cycles that XLA:TPU estimates for the kernels of GPT-2 with two layers.
    """

    values: jax.Array
    index: jax.Array
    """Position of each of `values` along the axis; same shape as `values`."""
    axis: int = dataclasses.field(metadata={"static": True})
    extent: int = dataclasses.field(metadata={"static": True})
    """Size of the axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[: self.axis], self.extent, *self.values.shape[self.axis :])

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.values.dtype)

    def materialize(self) -> jax.Array:
        """The array."""
        positions = jnp.arange(self.extent, dtype=self.index.dtype).reshape(-1, *(1,) * (self.values.ndim - self.axis))
        index, values = (jnp.expand_dims(x, self.axis) for x in (self.index, self.values))
        return jnp.where(positions == index, values, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Biased:
    """A deferred sum of a product and a bias, which have one dtype.

    An activation and its gradient each add the bias in their own kernel, so the sum is not written.
    """

    product: jax.Array
    bias: jax.Array
    """One value for each index of the last axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.product.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.product.dtype)

    def materialize(self) -> jax.Array:
        """The sum."""
        return self.product + self.bias


Deferred = Permuted | OneHot | Biased


def materialize(x: jax.Array | Deferred) -> jax.Array:
    """`x` as an array."""
    return x.materialize() if isinstance(x, Deferred) else x
