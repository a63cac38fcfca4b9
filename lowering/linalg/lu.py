"""LU factorizations, the solutions and determinants that torch computes from them, and helpers of linear algebra.

`_linalg_det`, `_linalg_slogdet` and `_linalg_solve_ex` also return a factorization that autograd solves with later.
Whether it is that of `A` or of its transpose depends on the memory layout of `A` and on torch's version, which a
lowering does not know: the engine passes it as `transposed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import register

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def exact(name: str) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Registers a lowering with its matrix products at the highest precision (TPU and GPU would round float32).

    Half types are computed in float32: JAX has these functions for wide types only.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @register(name)
        @functools.wraps(function)
        def wrapped(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            wide: Any = [up(x) if isinstance(x, jax.Array) else x for x in args]
            with jax.default_matmul_precision("highest"):
                return function(*wide, **kwargs)

        return wrapped

    return decorate


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def transpose(x: jax.Array) -> jax.Array:
    """The transpose of each matrix."""
    return jnp.swapaxes(x, -1, -2)


def eye_like(x: jax.Array) -> jax.Array:
    """Unit matrices of the shape of `x`."""
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


def first_true(bad: jax.Array) -> jax.Array:
    """Per row of `bad` [..., n]: the position of its first true element, counted from 1, or 0."""
    return as_dtype(jnp.where(jnp.any(bad, -1), jnp.argmax(bad, -1) + 1, 0), jnp.int32)


def empty(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Placeholder for a result that was not requested; torch gives it a shape without elements."""
    return jnp.zeros(shape.shape, shape.dtype)


def broadcast(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both, broadcast to common batch dimensions."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])


def triangular(
    a: jax.Array, b: jax.Array, *, lower: bool, left: bool = True, adjoint: bool = False, unit: bool = False
) -> jax.Array:
    """Solve A X = B, or X A = B if not `left`, for A or its adjoint; one triangle of A is read."""
    a, b = broadcast(a, b)
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=lower, transpose_a=adjoint, conjugate_a=adjoint, unit_diagonal=unit
    )


def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(LU, pivots from 1, info)."""
    if not a.size:
        shape = (*a.shape[:-2], min(a.shape[-2:]))
        return a, jnp.zeros(shape, jnp.int32), jnp.zeros(a.shape[:-2], jnp.int32)
    factors, pivots, _ = lax.linalg.lu(a)
    return factors, pivots + 1, first_true(jnp.diagonal(factors, axis1=-2, axis2=-1) == 0)


def _permutation(pivots: jax.Array, rows: int) -> jax.Array:
    """The row order that `pivots` (from 1) make of 0..rows-1."""
    if not pivots.size:
        return jnp.broadcast_to(jnp.arange(rows), (*pivots.shape[:-1], rows))
    return lax.linalg.lu_pivots_to_permutation(as_dtype(pivots - 1, jnp.int32), rows)


def _unpack(factors: jax.Array, permutation: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(P, L, U) with A = P L U."""
    rows, columns = factors.shape[-2:]
    rank = min(rows, columns)
    lower = jnp.tril(factors[..., :, :rank], -1) + jnp.eye(rows, rank, dtype=factors.dtype)
    return _permutation_matrix(permutation, factors.dtype), lower, jnp.triu(factors[..., :rank, :])


def _permutation_matrix(permutation: jax.Array, dtype: Any) -> jax.Array:
    rows = jnp.arange(permutation.shape[-1])
    return as_dtype(rows[:, None] == permutation[..., None, :], dtype)


def _solve_factored(
    factors: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint_: bool = False
) -> jax.Array:
    """A X = B or X A = B (not `left`), of A or its adjoint, from A's LU factorization."""
    if not left:
        return adjoint(_solve_factored(factors, pivots, adjoint(b), adjoint_=not adjoint_))
    batch = jnp.broadcast_shapes(factors.shape[:-2], b.shape[:-2])
    b = jnp.broadcast_to(b, batch + b.shape[-2:])
    order = jnp.broadcast_to(_permutation(pivots, factors.shape[-1]), batch + factors.shape[-1:])
    if adjoint_:
        x = triangular(factors, b, lower=False, adjoint=True)
        x = triangular(factors, x, lower=True, adjoint=True, unit=True)
        return jnp.take_along_axis(x, jnp.argsort(order, axis=-1)[..., None], axis=-2)
    x = jnp.take_along_axis(b, order[..., None], axis=-2)
    return triangular(factors, triangular(factors, x, lower=True, unit=True), lower=False)


@exact("linalg_lu_factor_ex")
def lu_factor_ex(
    a: jax.Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _lu(a)


@exact("linalg_lu")
def lu(a: jax.Array, *, pivot: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    factors, pivots, _ = _lu(a)
    return _unpack(factors, _permutation(pivots, a.shape[-2]))


@register("lu_unpack")
def lu_unpack(
    factors: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True, *, outs: Any
) -> tuple[jax.Array, ...]:
    results = _unpack(factors, _permutation(pivots, factors.shape[-2]))
    wanted = (unpack_pivots, unpack_data, unpack_data)
    return tuple(r if keep else empty(out) for r, keep, out in zip(results, wanted, outs, strict=True))


@exact("linalg_lu_solve")
def lu_solve(
    factors: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    return _solve_factored(factors, pivots, b, left=left, adjoint_=adjoint)


@exact("_linalg_solve_ex")
def solve_ex(
    a: jax.Array,
    b: jax.Array,
    *,
    left: bool = True,
    check_errors: bool = False,
    out: Any,
    transposed: bool = False,
) -> tuple[jax.Array, ...]:
    factors, pivots, info = _lu(transpose(a) if transposed else a)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    x = _solve_factored(factors, pivots, b[..., None] if vector else b, left=left, adjoint_=transposed)
    return (x[..., 0] if vector else x).reshape(out.shape), factors, pivots, info


@exact("linalg_inv_ex")
def inv_ex(a: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    factors, pivots, info = _lu(a)
    return _solve_factored(factors, pivots, eye_like(a)), info


def _determinant(a: jax.Array, transposed: bool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(diagonal of U, sign of the permutation, LU, pivots)."""
    factors, pivots, _ = _lu(transpose(a) if transposed else a)
    swaps = jnp.sum(pivots != jnp.arange(1, a.shape[-1] + 1), -1)
    sign = as_dtype(1 - 2 * (swaps % 2), a.dtype)
    return jnp.diagonal(factors, axis1=-2, axis2=-1), sign, factors, pivots


@exact("_linalg_det")
def det(a: jax.Array, *, transposed: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    diagonal, sign, factors, pivots = _determinant(a, transposed)
    return sign * jnp.prod(diagonal, -1), factors, pivots


@exact("_linalg_slogdet")
def slogdet(a: jax.Array, *, transposed: bool = False) -> tuple[jax.Array, ...]:
    diagonal, sign, factors, pivots = _determinant(a, transposed)
    return sign * jnp.prod(jnp.sign(diagonal), -1), jnp.sum(jnp.log(jnp.abs(diagonal)), -1), factors, pivots
