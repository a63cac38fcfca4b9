"""Loops that end when a float has become small end as without autocast; others stay low.  On JAX and StableHLO."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest
from jax import lax

import xla_amp
from xla_amp import stablehlo
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.jax import autocast

W = jax.random.normal(jax.random.key(13), (32, 32)) / 10
X = jax.random.normal(jax.random.key(1), (16, 32))
MOST = 200


def layer(w: Any, z: Any, x: Any) -> Any:
    return jnp.tanh(z @ w + x)


def directly(w: Any, x: Any) -> Any:
    def going(state: Any) -> Any:
        return (jnp.abs(state[0] - state[1]).max() > 1e-6) & (state[2] < MOST)

    return lax.while_loop(going, lambda s: (layer(w, s[0], x), s[0], s[2] + 1), (x, x + 1, 0))[2]


def by_a_boolean(w: Any, x: Any) -> Any:
    def step(state: Any) -> Any:
        after = layer(w, state[0], x)
        return after, jnp.all(jnp.abs(after - state[0]) < 1e-6), state[2] + 1

    return lax.while_loop(lambda s: ~s[1] & (s[2] < MOST), step, (x, False, 0))[2]


def by_a_count(w: Any, x: Any) -> Any:
    def step(state: Any) -> Any:
        after = layer(w, state[0], x)
        small = jnp.abs(after - state[0]).max() < 1e-6
        return after, jnp.where(small, state[1] + 1, 0), state[2] + 1

    return lax.while_loop(lambda s: (s[1] < 3) & (s[2] < MOST), step, (x, 0, 0))[2]


def by_an_inner_scan(w: Any, x: Any) -> Any:
    def inner(z: Any, _: Any) -> Any:
        after = jax.jit(layer)(w, z, x)
        return after, jnp.abs(after - z).max()

    def step(state: Any) -> Any:
        after, errors = lax.scan(inner, state[0], None, length=3)
        return after, errors[-1], state[2] + 1

    return lax.while_loop(lambda s: (s[1] > 1e-6) & (s[2] < MOST), step, (x, jnp.inf, 0))[2]


def by_a_gradient(w: Any, x: Any) -> Any:
    def objective(z: Any) -> Any:
        return jnp.sum((jnp.tanh(z @ w) - x / 10) ** 2) + jnp.sum(z**2)

    def step(state: Any) -> Any:
        gradient = jax.grad(objective)(state[0])
        return state[0] - gradient / 10, jnp.linalg.norm(gradient), state[2] + 1

    return lax.while_loop(lambda s: (s[1] > 1e-4) & (s[2] < MOST), step, (x, jnp.inf, 0))[2]


def lanes(w: Any, x: Any) -> Any:
    return jax.vmap(lambda row: directly(w, row[None]))(x)


def counted(w: Any, x: Any) -> Any:
    return lax.while_loop(lambda s: s[1] < 7, lambda s: (layer(w, s[0], x), s[1] + 1), (x, 0))[0]


def in_time(w: Any, x: Any) -> Any:
    return lax.while_loop(lambda s: s[1] < 0.65, lambda s: (layer(w, s[0], x), s[1] + 0.1), (x, 0.0))[0]


def until_a_token(w: Any, x: Any) -> Any:
    def step(state: Any) -> Any:
        z = layer(w, state[0], x)
        return z, jnp.argmax(z[0] @ w), state[2] + 1

    return lax.while_loop(lambda s: (s[1] != 5) & (s[2] < 7), step, (x, 0, 0))[0]


def low_products(text: str) -> int:
    return sum("bf16>, tensor" in line for line in text.splitlines() if "dot_general" in line)


def both(function: Any, *args: Any, **settings: Any) -> list[tuple[Any, int]]:
    """The result of a program under autocast, and its low products: of JAX, and of StableHLO."""
    run = jax.jit(autocast(function, dtype="bfloat16", **settings))
    text = run.lower(*args).as_text()
    converted = stablehlo.autocast(jax.jit(function).lower(*args), dtype="bfloat16", **settings)
    found = module_runs.run(converted.module, list(map(np.asarray, args)))[0]
    return [(run(*args), low_products(text)), (found, low_products(converted.text()))]


@pytest.mark.parametrize("function", [directly, by_a_boolean, by_a_count, by_an_inner_scan, by_a_gradient, lanes])
def test_loops_with_a_tolerance_end(function: Any) -> None:
    expected = function(W, X)
    assert jnp.max(expected) < MOST / 2
    for found, low in both(function, W, X):
        np.testing.assert_array_equal(found, expected)
        assert low == 0


@pytest.mark.parametrize(("function", "products"), [(counted, 1), (in_time, 1), (until_a_token, 2)])
def test_loops_that_count_stay_low(function: Any, products: int) -> None:
    for found, low in both(function, W, X):
        np.testing.assert_allclose(found, function(W, X), atol=0.01)
        assert low == products


def test_what_is_around_such_a_loop_stays_low() -> None:
    def steps(w: Any, x: Any) -> Any:
        return lax.fori_loop(0, 2, lambda i, s: (jnp.tanh(s[0] @ w), s[1] + directly(w, s[0])), (x, 0))[1]

    for found, low in both(steps, W, X):
        assert abs(int(found) - int(steps(W, X))) <= 2
        assert low == 1


def test_rules_and_the_reason() -> None:
    assert [low for _, low in both(directly, W, X, rules={"while_loop": "low"}, strict=True)] == [1, 1]
    assert [low for _, low in both(counted, W, X, rules={"while_loop": "fp32"}, strict=True)] == [0, 0]
    with pytest.warns(RuleWarning, match=r"tanh = low.*while_loop = low lets them"):
        assert autocast(directly, dtype="bfloat16", rules={"tanh": "low"})(W, X) == directly(W, X)
    carried = autocast(in_time, dtype="bfloat16", carry="low")  # 0.1 + 0.1 + ... in bfloat16 is another number of steps
    np.testing.assert_array_equal(carried(W, X), in_time(W, X))
    with pytest.raises(PolicyError, match=r"while_loop.*'fp32' or 'low'"):
        autocast(directly, rules={"while_loop": "keep"})
    for run in (
        lambda: autocast(directly, dtype="bfloat16")(W, X),
        lambda: stablehlo.autocast(jax.jit(directly).lower(W, X), dtype="bfloat16"),
    ):
        with xla_amp.explain() as report:
            run()
        (why,) = {row["why"] for row in report.rows() if row["operation"].split(".")[0] in ("matmul", "dot_general")}
        assert "ends by a comparison of floats" in why
        assert "while_loop = low" in why


@pytest.mark.full
def test_solvers_of_libraries() -> None:
    """A Newton iteration, a linear solver and an adaptive step; the gradient takes the same steps again."""
    lineax, optimistix = pytest.importorskip("lineax"), pytest.importorskip("optimistix")
    diffrax = pytest.importorskip("diffrax")
    b, a = X[0], W @ W.T + jnp.eye(32)

    def root(w: Any, b: Any) -> Any:
        solver = optimistix.Newton(1e-5, 1e-5)
        return optimistix.root_find(lambda y, _: y - layer(w, y, b), solver, jnp.zeros(32)).value

    def linear(a: Any, b: Any) -> Any:
        operator = lineax.MatrixLinearOperator(a, lineax.positive_semidefinite_tag)
        return lineax.linear_solve(operator, b, lineax.CG(1e-6, 1e-6)).value

    def equation(w: Any, b: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, _: jnp.tanh(w @ y) - y)
        control = diffrax.PIDController(1e-6, 1e-6)
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 5, 0.1, b, stepsize_controller=control).ys[0]

    for function, matrix in ((root, W), (linear, a), (equation, W)):
        found = jax.jit(autocast(function, dtype="bfloat16"))(matrix, b)
        np.testing.assert_allclose(found, function(matrix, b), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        linear(a, b), np.linalg.solve(np.asarray(a, np.float64), np.asarray(b, np.float64)), rtol=1e-4, atol=1e-5
    )

    def total(w: Any) -> Any:
        return equation(w, b).sum()

    exact = jax.grad(total)(W)
    for gradient in (jax.grad(autocast(total, dtype="bfloat16")), autocast(jax.grad(total), dtype="bfloat16")):
        np.testing.assert_allclose(gradient(W), exact, rtol=1e-3, atol=1e-5)
