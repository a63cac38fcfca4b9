"""Linear algebra: factorizations, solves and functions of matrices, on batches in the leading dimensions.

The results follow torch's conventions, which are LAPACK's:

- pivots count from 1; ``info`` is 0 or the number (from 1) of the column at which a factorization broke down;
- the Cholesky, triangular and symmetric routines read one triangle and ignore the other.

A failed factorization gives NaN where LAPACK leaves a partial result.  General eigenvalues exist on the platforms for
which JAX has them (CPU and, in newer versions, GPU); on TPU JAX raises its own error.
LU factorizations are in `lu`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import linalg as scipy_linalg

from xla_amp.lowering.linalg import lu  # noqa: F401  (registers its lowerings)
from xla_amp.lowering.linalg.lu import adjoint, broadcast, empty, exact, eye_like, first_true, transpose, triangular
from xla_amp.lowering.operand import as_dtype

linalg = lax.linalg


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
        return jnp.where(failed, jnp.maximum(first_true(lax.fori_loop(0, n, eliminate, (a, bad))[1]), 1), 0)

    # A second, slow elimination finds which leading minor failed; it runs only after a failure.
    none = jnp.zeros(a.shape[:-2], jnp.int32)
    return factor, lax.cond(jnp.any(failed), lambda: as_dtype(order(), jnp.int32), lambda: none) if a.size else none


@exact("linalg_cholesky_ex")
def cholesky_ex(a: jax.Array, *, upper: bool = False, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    factor, info = _lower_cholesky(adjoint(a) if upper else a)
    return adjoint(factor) if upper else factor, info


@exact("cholesky")
def cholesky(a: jax.Array, upper: bool = False) -> jax.Array:
    return cholesky_ex(a, upper=upper)[0]


@exact("_cholesky_solve_helper")
def cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool) -> jax.Array:
    first = triangular(factor, b, lower=not upper, adjoint=upper)
    return triangular(factor, first, lower=not upper, adjoint=not upper)


@exact("cholesky_inverse")
def cholesky_inverse(factor: jax.Array, upper: bool = False) -> jax.Array:
    return cholesky_solve(eye_like(factor), factor, upper)


# -- triangular systems -----------------------------------------------------------------------------------------------


@exact("linalg_solve_triangular")
def solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    return triangular(a, b, lower=not upper, left=left, unit=unitriangular)


@exact("triangular_solve")
def triangular_solve(
    b: jax.Array, a: jax.Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[jax.Array, jax.Array]:
    a, b = broadcast(a, b)
    solution = triangular(jnp.swapaxes(a, -1, -2) if transpose else a, b, lower=upper == transpose, unit=unitriangular)
    return solution, a


# -- orthogonal factors -----------------------------------------------------------------------------------------------


@exact("linalg_qr")
def qr(a: jax.Array, mode: str = "reduced", *, outs: Any) -> tuple[jax.Array, jax.Array]:
    if mode == "r":
        return empty(outs[0]), jnp.linalg.qr(a, mode="r")
    q, r = jnp.linalg.qr(a, mode=mode)
    return q, r


@exact("geqrf")
def geqrf(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    packed, tau = jnp.linalg.qr(a, mode="raw")  # LAPACK's column-major form, so transposed here
    return transpose(packed), tau


@exact("linalg_householder_product")
def householder_product(a: jax.Array, tau: jax.Array) -> jax.Array:
    return (
        linalg.householder_product(a, tau)
        if a.size and tau.size
        else jnp.broadcast_to(jnp.eye(a.shape[-2], a.shape[-1], dtype=a.dtype), a.shape)
    )


@exact("ormqr")
def ormqr(a: jax.Array, tau: jax.Array, c: jax.Array, left: bool = True, transpose: bool = False) -> jax.Array:
    rows, columns = a.shape[-2:]
    square = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, max(rows - columns, 0))])[..., :rows]
    q = householder_product(square, tau)
    q = adjoint(q) if transpose else q
    return q @ c if left else c @ q


# -- eigenvalues and singular values ----------------------------------------------------------------------------------


@exact("_linalg_eigh")
def eigh(a: jax.Array, UPLO: str = "L", compute_v: bool = True, *, outs: Any) -> tuple[jax.Array, jax.Array]:
    if not a.size:
        return empty(outs[0]), empty(outs[1])
    lower = UPLO.upper() == "L"
    # JAX reads the lower triangle on every platform; torch's upper triangle is its adjoint.
    vectors, values = linalg.eigh(a if lower else adjoint(a), lower=True, symmetrize_input=False)
    return values, vectors if compute_v else empty(outs[1])


@exact("linalg_matrix_sqrth")
def matrix_sqrth(a: jax.Array) -> jax.Array:
    if not a.size:
        return a
    vectors, values = linalg.eigh(a, lower=True, symmetrize_input=False)
    roots = as_dtype(jnp.sqrt(jnp.maximum(values, 0)), a.dtype)
    return (vectors * roots[..., None, :]) @ adjoint(vectors)


@exact("linalg_eig")
def eig(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, vectors = linalg.eig(a, compute_left_eigenvectors=False)
    return values, vectors


@exact("_linalg_eigvals")
def eigvals(a: jax.Array) -> jax.Array:
    return linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]


@exact("_linalg_svd")
def svd(
    a: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None, outs: Any
) -> tuple[jax.Array, ...]:
    if not a.size:
        wide = full_matrices and compute_uv
        u, v = (_eye_of(out) if wide else empty(out) for out in (outs[0], outs[2]))
        return u, empty(outs[1]), v
    if compute_uv:
        u, s, vh = linalg.svd(a, full_matrices=full_matrices)
        return u, s, vh
    return empty(outs[0]), linalg.svd(a, compute_uv=False), empty(outs[2])


@exact("linalg_polar")
def polar(a: jax.Array, *, outs: Any) -> tuple[jax.Array, jax.Array]:
    if not a.size:
        return empty(outs[0]), empty(outs[1])
    u, s, vh = linalg.svd(a, full_matrices=False)
    return u @ vh, (adjoint(vh) * as_dtype(s, a.dtype)[..., None, :]) @ vh


def _eye_of(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(shape.shape[-2], shape.shape[-1], dtype=shape.dtype), shape.shape)


# -- least squares, functions of matrices -----------------------------------------------------------------------------


@exact("linalg_lstsq")
def lstsq(
    a: jax.Array, b: jax.Array, rcond: float | None = None, *, driver: str | None = None, outs: Any
) -> tuple[jax.Array, ...]:
    """(solution, residuals, rank, singular values).

    Driver "gels" (the default, as on every accelerator) assumes that `a` has full rank and uses QR; the others compute
    the least-norm solution from an SVD.  `residuals` are returned for every tall `a`.
    """
    rows, columns = a.shape[-2:]
    vector = b.ndim == a.ndim - 1
    a_, b_ = broadcast(a, b[..., None] if vector else b)
    if driver in (None, "gels"):
        rank, values = empty(outs[2]), empty(outs[3])
        if rows >= columns:
            q, r = jnp.linalg.qr(a_)
            x = triangular(r, adjoint(q) @ b_, lower=False)
        else:
            q, r = jnp.linalg.qr(adjoint(a_))
            x = q @ triangular(r, b_, lower=False, adjoint=True)
    else:
        u, s, vh = linalg.svd(a_, full_matrices=False)
        cutoff = jnp.finfo(a.dtype).eps * max(rows, columns) if rcond is None else rcond
        kept = s > cutoff * jnp.max(s, -1, keepdims=True, initial=0)
        inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)
        x = adjoint(vh) @ (as_dtype(inverse, a.dtype)[..., None] * (adjoint(u) @ b_))
        rank = jnp.sum(kept, -1).reshape(outs[2].shape) if a_.shape[:-2] == a.shape[:-2] else jnp.sum(kept, -1)
        values = s if driver in ("gelsd", "gelss") else empty(outs[3])
    residuals = empty(outs[1])
    if residuals.size:
        residuals = jnp.sum(jnp.abs(b_ - a_ @ x) ** 2, axis=-2).reshape(outs[1].shape)
    return x[..., 0] if vector else x, residuals, rank, values


@exact("linalg_matrix_exp")
def matrix_exp(a: jax.Array) -> jax.Array:
    return scipy_linalg.expm(a) if a.size else a
