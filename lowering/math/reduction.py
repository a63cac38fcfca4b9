"""Reductions: sums, products, extremes, moments, norms.

Halves are reduced in float32 and rounded once at the end.  As in most of
torch, an empty list of dimensions means all of them.  Sorting, ranks and running reductions are in `ordering`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.math import ordering  # noqa: F401  (registers its lowerings)
from xla_amp.lowering.operand import as_dtype, axes, opmath, sums_of_rows, up
from xla_amp.lowering.registry import register

Dim = int | Sequence[int] | None


# -- sums and products: `dtype`, when given, is taken on before reducing; it is the result's --------------------------


@register("sum", "sum.dim_IntList")
def sum_(
    x: jax.Array, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None, out: Any, platform: str
) -> jax.Array:
    """Sum; of integers and booleans as int64 unless `dtype` says otherwise."""
    over = sorted(axes(dim, x.ndim))
    x = as_dtype(x, opmath(out.dtype))
    if 0 < len(over) < x.ndim and over == list(range(len(over))):
        (total,) = sums_of_rows([x], len(over), platform)
        return total.reshape(out.shape)
    return jnp.sum(x, axis=tuple(over), keepdims=keepdim)


@register("mean", "mean.dim")
def mean(x: jax.Array, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None, out: Any) -> jax.Array:
    """Arithmetic mean."""
    return jnp.mean(as_dtype(x, opmath(out.dtype)), axis=axes(dim, x.ndim), keepdims=keepdim)


@register("prod", "prod.dim_int")
def prod(x: jax.Array, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None, out: Any) -> jax.Array:
    """Product; of integers and booleans as int64 unless `dtype` says otherwise."""
    return jnp.prod(as_dtype(x, opmath(out.dtype)), axis=axes(dim, x.ndim), keepdims=keepdim)


# -- extremes: NaN wins, the first of equals is reported --------------------------------------------------------------

_EXTREMES: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "max": (jnp.max, lax.argmax),
    "min": (jnp.min, lax.argmin),
}


def _register_extreme(name: str, extreme: Callable[..., jax.Array], argument: Callable[..., jax.Array]) -> None:
    def over(x: jax.Array, dim: Dim = None, keepdim: bool = False) -> jax.Array:
        return extreme(x, axis=axes(dim, x.ndim), keepdims=keepdim)

    def position(x: jax.Array, dim: int | None, *, out: Any) -> jax.Array:
        if dim is None or x.ndim == 0:
            x, dim = x.reshape(-1), 0
        index = np.int32 if x.size < 2**31 else np.int64
        return argument(x, dim % x.ndim, index).reshape(out.shape)

    def both(x: jax.Array, dim: int, keepdim: bool = False, *, out: Any) -> tuple[jax.Array, jax.Array]:
        return over(x, dim, keepdim), position(x, dim, out=out)

    def only_position(x: jax.Array, dim: int | None = None, keepdim: bool = False, *, out: Any) -> jax.Array:
        return position(x, dim, out=out)

    register(name, f"a{name}")(over)
    register(f"{name}.dim")(both)
    register(f"arg{name}")(only_position)


for _name, (_extreme, _argument) in _EXTREMES.items():
    _register_extreme(_name, _extreme, _argument)


# -- truth and counts -------------------------------------------------------------------------------------------------


@register("all", "all.dim", "all.dims", "_is_all_true")
def all_(x: jax.Array, dim: Dim = None, keepdim: bool = False) -> jax.Array:
    """Whether no element is zero."""
    return jnp.all(x, axis=axes(dim, x.ndim), keepdims=keepdim)


@register("any", "any.dim", "any.dims", "_is_any_true")
def any_(x: jax.Array, dim: Dim = None, keepdim: bool = False) -> jax.Array:
    """Whether any element is not zero."""
    return jnp.any(x, axis=axes(dim, x.ndim), keepdims=keepdim)


@register("histc")
def histc(x: jax.Array, bins: int = 100, min: Any = 0, max: Any = 0) -> jax.Array:  # schema names
    """Counts in `bins` equal bins of [min, max], or of the data's range if both are equal."""
    x = up(x.reshape(-1))
    if not x.size:
        return jnp.zeros((bins,), x.dtype)
    low, high = as_dtype(min, x.dtype), as_dtype(max, x.dtype)
    own = low == high
    low, high = jnp.where(own, jnp.min(x), low), jnp.where(own, jnp.max(x), high)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    inside = (x >= low) & (x <= high)
    index = jnp.clip(((x - low) / (high - low) * bins).astype(jnp.int32), 0, bins - 1)
    return jnp.zeros((bins,), x.dtype).at[jnp.where(inside, index, bins)].add(1, mode="drop")


@register("_aminmax", "_aminmax.dim")
def both_ends(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Minimum and maximum."""
    axis = axes(dim, x.ndim)
    return jnp.min(x, axis=axis, keepdims=keepdim), jnp.max(x, axis=axis, keepdims=keepdim)


# -- moments: two passes in opmath; inf or NaN if the correction is not below the number of elements ------------------


@register("var_mean.correction", static=("correction",), dynamic=("correction",))
def var_mean(
    x: jax.Array, dim: Dim = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Variance and mean."""
    axis, x = axes(dim, x.ndim), up(x)
    center = jnp.mean(x, axis=axis, keepdims=True)
    count = math.prod(x.shape[a] for a in axis)
    freedom = jnp.maximum(count - (1 if correction is None else correction), 0)
    squares = jnp.sum(jnp.square(jnp.abs(x - center)), axis=axis, keepdims=keepdim)
    return squares / as_dtype(freedom, squares.dtype), center if keepdim else jnp.squeeze(center, axis)


@register("var.correction", static=("correction",), dynamic=("correction",))
def var(x: jax.Array, dim: Dim = None, *, correction: Any = None, keepdim: bool = False) -> jax.Array:
    """Variance with divisor ``count - correction`` (1 by default)."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


# -- norms ------------------------------------------------------------------------------------------------------------


def vector_norm(x: jax.Array, order: Any, axis: tuple[int, ...], keepdim: bool) -> jax.Array:
    """The `order`-norm along `axis`; 0 counts nonzero elements, inf and -inf give the greatest and least magnitude."""
    size = jnp.abs(x)
    if order == 0:
        return jnp.sum(as_dtype(size != 0, size.dtype), axis=axis, keepdims=keepdim)
    if order == 1:
        return jnp.sum(size, axis=axis, keepdims=keepdim)
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, axis=axis, keepdims=keepdim))
    if order == math.inf:
        return jnp.max(size, axis=axis, keepdims=keepdim)
    if order == -math.inf:
        return jnp.min(size, axis=axis, keepdims=keepdim)
    power = np.asarray(order, size.dtype)
    return jnp.power(jnp.sum(jnp.power(size, power), axis=axis, keepdims=keepdim), 1 / power)


@register("linalg_vector_norm", static=("ord",))
def linalg_vector_norm(
    x: jax.Array,
    ord: Any = 2,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,  # schema names
) -> jax.Array:
    """The vector norm of order `ord`, computed in `dtype` if given."""
    x = x if dtype is None else as_dtype(x, dtype)
    return vector_norm(up(x), ord, axes(dim, x.ndim), keepdim)


@register("logsumexp")
def logsumexp(x: jax.Array, dim: Dim, keepdim: bool = False, *, out: Any) -> jax.Array:
    """log(sum(exp(x))) without overflow."""
    return jax.nn.logsumexp(as_dtype(x, opmath(out.dtype)), axis=axes(dim, x.ndim), keepdims=keepdim)
