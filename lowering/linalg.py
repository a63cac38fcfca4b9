"""Linear algebra: factorizations, solves and functions of matrices, on batches in the leading dimensions.

torch's conventions, which LAPACK gave it, hold wherever they can be seen:

- pivots count from 1; ``info`` is 0 or the number (from 1) of the column at which a factorization broke down;
- the Cholesky, triangular and symmetric routines read one triangle and ignore the other;
- `_linalg_det`, `_linalg_slogdet` and `_linalg_solve_ex` also return an LU factorization that autograd solves with
  later.  Whether it is that of `A` or of its transpose depends on the memory of `A` and on torch's version, which a
  lowering does not see: `transposed` says it, and the engine calls the form that fits.

A failed factorization gives NaN where LAPACK leaves half of a result.  General eigenvalues exist on the platforms for
which JAX has them (CPU and, from some versions on, GPU); on TPU the program is refused with JAX's own message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import linalg as scipy_linalg

from xla_amp.lowering.operand import as_dtype
from xla_amp.lowering.registry import register

linalg = lax.linalg


def exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with every matrix product inside it at full precision (TPU and GPU would round float32 operands)."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*args, **kwargs)

    return wrapped


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _eye_like(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


def _first(bad: jax.Array) -> jax.Array:
    """Per row of `bad` [..., n]: the place of its first true element from 1, or 0."""
    return as_dtype(jnp.where(jnp.any(bad, -1), jnp.argmax(bad, -1) + 1, 0), jnp.int32)


def _empty(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(shape.shape, shape.dtype)


# -- Cholesky ---------------------------------------------------------------------------------------------------------


def _lower_cholesky(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(L, info) from the lower triangle of Hermitian matrices."""
    factor = linalg.cholesky(a, symmetrize_input=False)
    failed = jnp.any(jnp.isnan(factor), axis=(-1, -2))
    n = a.shape[-1]

    def eliminate(k: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rest, bad = state
        pivot = jnp.real(rest[..., k, k])
        bad = bad.at[..., k].set(~(pivot > 0))
        column = jnp.where(jnp.arange(n) > k, rest[..., :, k], 0)
        ratio = column / jnp.where(pivot > 0, pivot, 1)[..., None]
        return rest - ratio[..., :, None] * jnp.conj(column)[..., None, :], bad

    def order() -> jax.Array:
        bad = jnp.zeros(a.shape[:-1], bool)
        return jnp.where(failed, jnp.maximum(_first(lax.fori_loop(0, n, eliminate, (a, bad))[1]), 1), 0)

    # Which leading minor failed is a second, slow elimination that only a failure pays for.
    none = jnp.zeros(a.shape[:-2], jnp.int32)
    return factor, lax.cond(jnp.any(failed), lambda: as_dtype(order(), jnp.int32), lambda: none) if a.size else none


@register("linalg_cholesky_ex")
@exact
def cholesky_ex(a: jax.Array, *, upper: bool = False, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    factor, info = _lower_cholesky(adjoint(a) if upper else a)
    return adjoint(factor) if upper else factor, info


@register("cholesky")
@exact
def cholesky(a: jax.Array, upper: bool = False) -> jax.Array:
    return cholesky_ex(a, upper=upper)[0]


@register("_cholesky_solve_helper")
@exact
def cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool) -> jax.Array:
    first = _solve_triangle(factor, b, lower=not upper, adjoint=upper)
    return _solve_triangle(factor, first, lower=not upper, adjoint=not upper)


@register("cholesky_inverse")
@exact
def cholesky_inverse(factor: jax.Array, upper: bool = False) -> jax.Array:
    return cholesky_solve(_eye_like(factor), factor, upper)


# -- triangular systems -----------------------------------------------------------------------------------------------


def _broadcast(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both with the batch dimensions of either."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])


def _solve_triangle(
    a: jax.Array, b: jax.Array, *, lower: bool, left: bool = True, adjoint: bool = False, unit: bool = False
) -> jax.Array:
    a, b = _broadcast(a, b)
    return linalg.triangular_solve(
        a, b, left_side=left, lower=lower, transpose_a=adjoint, conjugate_a=adjoint, unit_diagonal=unit
    )


@register("linalg_solve_triangular")
@exact
def solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    return _solve_triangle(a, b, lower=not upper, left=left, unit=unitriangular)


@register("triangular_solve")
@exact
def triangular_solve(
    b: jax.Array, a: jax.Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[jax.Array, jax.Array]:
    a, b = _broadcast(a, b)
    solution = linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return solution, a


# -- LU ---------------------------------------------------------------------------------------------------------------


def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(LU, pivots from 1, info)."""
    if not a.size:
        shape = (*a.shape[:-2], min(a.shape[-2:]))
        return a, jnp.zeros(shape, jnp.int32), jnp.zeros(a.shape[:-2], jnp.int32)
    factors, pivots, _ = linalg.lu(a)
    return factors, pivots + 1, _first(jnp.diagonal(factors, axis1=-2, axis2=-1) == 0)


def _lu_without_pivots(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, columns = a.shape[-2:]
    rank = min(rows, columns)

    def eliminate(k: int, rest: jax.Array) -> jax.Array:
        below, right = jnp.arange(rows) > k, jnp.arange(columns) > k
        ratio = jnp.where(below, rest[..., :, k] / rest[..., k, k][..., None], 0)
        rest = rest - ratio[..., :, None] * jnp.where(right, rest[..., k, :], 0)[..., None, :]
        return rest.at[..., :, k].set(jnp.where(below, ratio, rest[..., :, k]))

    factors = lax.fori_loop(0, rank, eliminate, a) if a.size else a
    pivots = jnp.broadcast_to(jnp.arange(1, rank + 1, dtype=jnp.int32), (*a.shape[:-2], rank))
    return factors, pivots, _first(jnp.diagonal(factors, axis1=-2, axis2=-1) == 0)


def _permutation(pivots: jax.Array, rows: int) -> jax.Array:
    """The row order that `pivots` (from 1) make of 0..rows-1."""
    if not pivots.size:
        return jnp.broadcast_to(jnp.arange(rows), (*pivots.shape[:-1], rows))
    return linalg.lu_pivots_to_permutation(as_dtype(pivots - 1, jnp.int32), rows)


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
        x = _solve_triangle(factors, b, lower=False, adjoint=True)
        x = _solve_triangle(factors, x, lower=True, adjoint=True, unit=True)
        return jnp.take_along_axis(x, jnp.argsort(order, axis=-1)[..., None], axis=-2)
    x = jnp.take_along_axis(b, order[..., None], axis=-2)
    return _solve_triangle(factors, _solve_triangle(factors, x, lower=True, unit=True), lower=False)


@register("linalg_lu_factor_ex")
@exact
def lu_factor_ex(
    a: jax.Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _lu(a) if pivot else _lu_without_pivots(a)


@register("linalg_lu")
@exact
def lu(a: jax.Array, *, pivot: bool = True, outs: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    factors, pivots, _ = lu_factor_ex(a, pivot=pivot)
    permutation, lower, upper = _unpack(factors, _permutation(pivots, a.shape[-2]))
    return permutation if pivot else _empty(outs[0]), lower, upper


@register("lu_unpack")
def lu_unpack(
    factors: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True, *, outs: Any
) -> tuple[jax.Array, ...]:
    results = _unpack(factors, _permutation(pivots, factors.shape[-2]))
    wanted = (unpack_pivots, unpack_data, unpack_data)
    return tuple(r if keep else _empty(out) for r, keep, out in zip(results, wanted, outs, strict=True))


@register("linalg_lu_solve")
@exact
def lu_solve(
    factors: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    return _solve_factored(factors, pivots, b, left=left, adjoint_=adjoint)


@register("_linalg_solve_ex")
@exact
def solve_ex(
    a: jax.Array,
    b: jax.Array,
    *,
    left: bool = True,
    check_errors: bool = False,
    out: Any,
    transposed: bool = False,
) -> tuple[jax.Array, ...]:
    factors, pivots, info = _lu(_transpose(a) if transposed else a)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    x = _solve_factored(factors, pivots, b[..., None] if vector else b, left=left, adjoint_=transposed)
    return (x[..., 0] if vector else x).reshape(out.shape), factors, pivots, info


@register("linalg_inv_ex")
@exact
def inv_ex(a: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    factors, pivots, info = _lu(a)
    return _solve_factored(factors, pivots, _eye_like(a)), info


def _determinant(a: jax.Array, transposed: bool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(diagonal of U, sign of the permutation, LU, pivots)."""
    factors, pivots, _ = _lu(_transpose(a) if transposed else a)
    swaps = jnp.sum(pivots != jnp.arange(1, a.shape[-1] + 1), -1)
    sign = as_dtype(1 - 2 * (swaps % 2), a.dtype)
    return jnp.diagonal(factors, axis1=-2, axis2=-1), sign, factors, pivots


@register("_linalg_det")
@exact
def det(a: jax.Array, *, transposed: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    diagonal, sign, factors, pivots = _determinant(a, transposed)
    return sign * jnp.prod(diagonal, -1), factors, pivots


@register("_linalg_slogdet")
@exact
def slogdet(a: jax.Array, *, transposed: bool = False) -> tuple[jax.Array, ...]:
    diagonal, sign, factors, pivots = _determinant(a, transposed)
    return sign * jnp.prod(jnp.sign(diagonal), -1), jnp.sum(jnp.log(jnp.abs(diagonal)), -1), factors, pivots


# -- orthogonal factors -----------------------------------------------------------------------------------------------


@register("linalg_qr")
@exact
def qr(a: jax.Array, mode: str = "reduced", *, outs: Any) -> tuple[jax.Array, jax.Array]:
    if mode == "r":
        return _empty(outs[0]), jnp.linalg.qr(a, mode="r")
    q, r = jnp.linalg.qr(a, mode=mode)
    return q, r


@register("geqrf")
@exact
def geqrf(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    packed, tau = jnp.linalg.qr(a, mode="raw")  # as LAPACK keeps it: column-major, so transposed here
    return _transpose(packed), tau


@register("linalg_householder_product")
@exact
def householder_product(a: jax.Array, tau: jax.Array) -> jax.Array:
    return (
        linalg.householder_product(a, tau)
        if a.size and tau.size
        else jnp.broadcast_to(jnp.eye(*a.shape[-2:], dtype=a.dtype), a.shape)
    )


@register("ormqr")
@exact
def ormqr(a: jax.Array, tau: jax.Array, c: jax.Array, left: bool = True, transpose: bool = False) -> jax.Array:
    rows, columns = a.shape[-2:]
    square = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, max(rows - columns, 0))])[..., :rows]
    q = householder_product(square, tau)
    q = adjoint(q) if transpose else q
    return q @ c if left else c @ q


# -- eigenvalues and singular values ----------------------------------------------------------------------------------


@register("_linalg_eigh")
@exact
def eigh(a: jax.Array, UPLO: str = "L", compute_v: bool = True, *, outs: Any) -> tuple[jax.Array, jax.Array]:
    if not a.size:
        return _empty(outs[0]), _empty(outs[1])
    lower = UPLO.upper() == "L"
    # JAX reads the lower triangle on every platform; torch's upper triangle is its adjoint.
    vectors, values = linalg.eigh(a if lower else adjoint(a), lower=True, symmetrize_input=False)
    return values, vectors if compute_v else _empty(outs[1])


@register("linalg_eig")
@exact
def eig(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, vectors = linalg.eig(a, compute_left_eigenvectors=False)
    return values, vectors


@register("_linalg_eigvals")
@exact
def eigvals(a: jax.Array) -> jax.Array:
    return linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]


@register("_linalg_svd")
@exact
def svd(
    a: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None, outs: Any
) -> tuple[jax.Array, ...]:
    if not a.size:
        wide = full_matrices and compute_uv
        u, v = (_eye_of(out) if wide else _empty(out) for out in (outs[0], outs[2]))
        return u, _empty(outs[1]), v
    if compute_uv:
        u, s, vh = linalg.svd(a, full_matrices=full_matrices)
        return u, s, vh
    return _empty(outs[0]), linalg.svd(a, compute_uv=False), _empty(outs[2])


def _eye_of(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(*shape.shape[-2:], dtype=shape.dtype), shape.shape)


# -- least squares, functions of matrices -----------------------------------------------------------------------------


@register("linalg_lstsq")
@exact
def lstsq(
    a: jax.Array, b: jax.Array, rcond: float | None = None, *, driver: str | None = None, outs: Any
) -> tuple[jax.Array, ...]:
    """(solution, residuals, rank, singular values).

    Driver "gels" (the default, as on every accelerator) takes `a` to be of full rank and uses QR; the others take the
    solution of least norm from an SVD.  `residuals` are given for every tall `a`.
    """
    rows, columns = a.shape[-2:]
    vector = b.ndim == a.ndim - 1
    a_, b_ = _broadcast(a, b[..., None] if vector else b)
    if driver in (None, "gels"):
        rank, values = _empty(outs[2]), _empty(outs[3])
        if rows >= columns:
            q, r = jnp.linalg.qr(a_)
            x = _solve_triangle(r, adjoint(q) @ b_, lower=False)
        else:
            q, r = jnp.linalg.qr(adjoint(a_))
            x = q @ _solve_triangle(r, b_, lower=False, adjoint=True)
    else:
        u, s, vh = linalg.svd(a_, full_matrices=False)
        cutoff = jnp.finfo(a.dtype).eps * max(rows, columns) if rcond is None else rcond
        kept = s > cutoff * jnp.max(s, -1, keepdims=True, initial=0)
        inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)
        x = adjoint(vh) @ (as_dtype(inverse, a.dtype)[..., None] * (adjoint(u) @ b_))
        rank = jnp.sum(kept, -1).reshape(outs[2].shape) if a_.shape[:-2] == a.shape[:-2] else jnp.sum(kept, -1)
        values = s if driver in ("gelsd", "gelss") else _empty(outs[3])
    residuals = _empty(outs[1])
    if residuals.size:
        residuals = jnp.sum(jnp.abs(b_ - a_ @ x) ** 2, axis=-2).reshape(outs[1].shape)
    return x[..., 0] if vector else x, residuals, rank, values


@register("linalg_matrix_exp")
@exact
def matrix_exp(a: jax.Array) -> jax.Array:
    return scipy_linalg.expm(a) if a.size else a
