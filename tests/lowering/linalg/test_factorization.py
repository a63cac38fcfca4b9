"""Linear algebra against torch on the CPU: edges, sides and half types."""

from __future__ import annotations

import jax
import pytest
import torch
from harness import (
    TOLERANCE,
    Lowered,
    called,
    check,
    compare,
    computed,
    is_here,
    lowering_of,
    operator,
    run,
    sample,
    to_array,
    to_tensor,
    together,
)

from xla_amp.lowering.linalg import factorization  # noqa: F401  (fills the table)

FACTOR = 20
"""Factors on the tolerances: errors of factorizations grow with the matrix and its condition."""


def tol(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": FACTOR * TOLERANCE[dtype], "atol": FACTOR * TOLERANCE[dtype]}


def square(n: int = 5, *batch: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Matrices far from singular."""
    return sample(*batch, n, n, dtype=dtype, seed=seed) + 2 * n**0.5 * torch.eye(n, dtype=dtype)


def positive(n: int = 5, *batch: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    x = sample(*batch, n, n, dtype=dtype, seed=seed)
    return x @ x.mH + torch.eye(n, dtype=dtype)


def results(name: str, *args: object, **kwargs: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(the lowering's results, torch's)."""
    expected = operator(name)(*args, **kwargs)
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    got = run(name, *args, **kwargs)
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape
    return got, expected


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    compare(got, want, **tol(want.dtype))


# -- Cholesky and triangles -------------------------------------------------------------------------------------------


@together("upper", [False, True])
def test_the_other_triangle_is_never_read(upper):
    a, junk = positive(5, 2, dtype=torch.complex64), sample(2, 5, 5, dtype=torch.complex64, seed=3)
    half = a.triu() + junk.tril(-1) if upper else a.tril() + junk.triu(1)
    check("linalg_cholesky_ex", half, upper=upper, **tol(a.dtype))
    check("_linalg_eigh", half, "U" if upper else "L", False, **tol(a.dtype))


def test_cholesky_says_which_minor_is_not_positive():
    bad = torch.eye(4).repeat(4, 1, 1)
    bad[1, 2, 2] = -1.0
    bad[2, 0, 0] = 0.0
    bad[3, 3, 0] = 5.0  # the last minor: 1 - 25
    (factor, info), (_, expected) = results("linalg_cholesky_ex", bad)
    assert info.tolist() == expected.tolist() == [0, 3, 1, 4]
    assert torch.equal(factor[0], bad[0])
    assert factor[1:].isnan().any((1, 2)).all()


def test_sides_of_solutions():
    a, b = square(4, dtype=torch.complex64), sample(4, 4, dtype=torch.complex64, seed=1)
    check("triangular_solve", b, a, False, True, True, **tol(a.dtype))
    check("_linalg_solve_ex", a, b, left=False, skip=(1, 2), **tol(a.dtype))  # others depend on the memory layout


# -- LU ---------------------------------------------------------------------------------------------------------------


def test_lu_of_singular_matrices():
    singular = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    for name in ("linalg_lu_factor_ex", "linalg_inv_ex"):
        got, expected = results(name, singular)
        assert got[-1].tolist() == expected[-1].tolist() == 2


@together("name", ["_linalg_det", "_linalg_slogdet", "_linalg_solve_ex"])
@together("transposed", [False, True])
def test_factorizations_for_autograd_are_of_the_side_asked_for(name, transposed):
    a, b = square(4, dtype=torch.float64), sample(4, 2, dtype=torch.float64)
    arguments = (a, b) if "solve" in name else (a,)
    like = operator(name)(*arguments)
    with jax.enable_x64(True):
        options = {"out": jax.ShapeDtypeStruct((4, 2), "float64")} if "solve" in name else {}
        got = lowering_of(name).function(*map(to_array, arguments), transposed=transposed, **options)
        results = [to_tensor(g, w.dtype) for g, w in zip(got, like, strict=True)]
    where = 1 if name != "_linalg_slogdet" else 2
    close(results[0], like[0])
    p, lower, upper = torch.lu_unpack(results[where], results[where + 1])
    close(p @ lower @ upper, a.mT if transposed else a)


def test_empty_matrices():
    a = torch.empty(2, 0, 0)
    for name in ("_linalg_det", "_linalg_slogdet", "linalg_inv_ex", "linalg_cholesky_ex", "_linalg_eigh", "linalg_lu"):
        check(name, a)
    check("_linalg_svd", torch.empty(3, 0), True, True)


# -- least squares and functions --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the size of what torch.linalg.lstsq")
def test_lstsq_of_deficient_rank_takes_the_least_norm():
    a = sample(6, 3, dtype=torch.float64)
    a[:, 2] = a[:, 0] + a[:, 1]
    b = sample(6, 2, dtype=torch.float64)
    like = torch.linalg.lstsq(a, b, driver="gelsd")
    solution, _, rank, _ = run("linalg_lstsq", a, b, driver="gelsd")
    close(solution, like.solution)
    assert rank.item() == 2


def test_matrix_exp_of_small_and_large_matrices():
    for scale in (0.003, 2.7):
        a = sample(2, 4, 4, dtype=torch.float64) * scale
        check("linalg_matrix_exp", a, rtol=30 * FACTOR * 1e-11, atol=30 * FACTOR * 1e-11)


def test_roots_and_polar_forms_of_matrices():
    if not is_here("linalg_polar"):
        pytest.skip("torch 2.14 and later")
    for dtype in (torch.float64, torch.complex64):
        a, junk = positive(5, 2, dtype=dtype), sample(2, 5, 5, dtype=dtype, seed=3)
        check("linalg_matrix_sqrth", a.tril() + junk.triu(1), **tol(dtype))
        check("linalg_polar", sample(2, 5, 3, dtype=dtype), **tol(dtype))
    check("linalg_matrix_sqrth", torch.tensor([[4.0, 0.0], [1.0, -3.0]]), **tol(torch.float32))  # its root has no NaN
    for shape in ((2, 0, 0), (0, 3, 3)):
        check("linalg_matrix_sqrth", torch.empty(shape))
        check("linalg_polar", torch.empty(shape))


def test_half_types_are_computed_in_float32():
    """JAX has these functions for wide types only; the result is the float32 one of the same operands, rounded."""
    full, half = torch.float32, torch.bfloat16
    a, tall, b = (x.to(half) for x in (positive(dtype=full), sample(6, 4, dtype=full), sample(5, 2, dtype=full)))
    upper, tau = positive(dtype=full).triu().to(half), sample(4, dtype=full).to(half)
    pivots = torch.tensor([2, 2, 3, 5, 5], dtype=torch.int32)
    calls = [
        *((name, (a,), {}) for name in ("linalg_cholesky_ex", "cholesky_inverse", "linalg_lu_factor_ex")),
        *((name, (a,), {}) for name in ("linalg_matrix_exp", "linalg_inv_ex", "_linalg_det", "_linalg_slogdet")),
        *((name, (tall,), {}) for name in ("linalg_qr", "geqrf", "_linalg_svd", "linalg_lu")),
        ("_linalg_eigh", (a,), {}),
        ("_linalg_solve_ex", (a, b), {}),
        ("linalg_solve_triangular", (upper, b), {"upper": True}),
        ("triangular_solve", (b, upper), {}),
        ("_cholesky_solve_helper", (b, upper, True), {}),
        ("linalg_lu_solve", (a, pivots, b), {}),
        ("linalg_householder_product", (tall, tau), {}),
        ("ormqr", (tall, tau, sample(6, 2, dtype=full).to(half)), {}),
        ("linalg_lstsq", (tall, sample(6, 2, dtype=full).to(half)), {"driver": "gelsd"}),
    ]
    pairs = []
    for name, operands, options in calls:
        wide = [x.float() if isinstance(x, torch.Tensor) and x.dtype is half else x for x in operands]
        like = called(name, wide, options, "cpu")
        halves = [x.to(half) if x.dtype is full else x for x in like]
        pairs += [Lowered(name, wide, options, like, "cpu"), Lowered(name, operands, options, halves, "cpu")]
    results = computed(pairs)
    for (name, *_), expected, got in zip(calls, results[::2], results[1::2], strict=True):
        for low, high in zip(got, expected, strict=True):
            assert low.dtype is (half if high.dtype is full else high.dtype), name
            torch.testing.assert_close(low, high.to(low.dtype), rtol=0, atol=0, equal_nan=True)
