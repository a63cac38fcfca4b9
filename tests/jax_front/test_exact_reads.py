"""Products that are counted, compared, ordered or returned, and loops that end by a float: on JAX and StableHLO."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest
from contractions import contractions
from jax import lax

import xla_amp
from xla_amp import stablehlo
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.jax import autocast

M = jnp.stack([jnp.arange(1000) < 751, jnp.arange(1000) < 1000]).astype(jnp.float32)
"""Zeros and ones, which bfloat16 holds; 751 of them it does not."""

EXACT: dict[str, Any] = {
    "an integer": lambda m: (m @ m.T).astype(jnp.int32),
    "positions in an expert": lambda m: (m @ jnp.triu(jnp.ones((1000, 1000)))).astype(jnp.int32),
    "above a number": lambda m: (m @ m.T) > 750.0,
    "equal to a number": lambda m: (m @ m.T) == 751,
    "a number of another function": lambda m: jax.jit(lambda a, most: a > most)(m @ m.T, 750.3),
    "above an argument": lambda m: (m @ m.T) > 1000 * m[1, 0] - 249.5,
    "a rounded count, in a product": lambda m: jnp.tile(jnp.round(m @ m.T) - 700, 3) @ jnp.tile(jnp.eye(2), (3, 1)),
    "floor": lambda m: jnp.floor(m @ m.T),
    "sorted": lambda m: jnp.sort((m @ m.T).ravel()),
    "argmax": lambda m: jnp.argmax(jnp.stack([m[:, :750] @ m.T[:750], m @ m.T])[:, 0, 0]),
    "top_k": lambda m: lax.top_k((m @ m.T).ravel(), 2)[0],
    "searched": lambda m: jnp.searchsorted((m @ m.T).ravel()[1:], jnp.array([750.5, 751.5])),
    "the result": lambda m: m @ m.T,
    "a result of a function": lambda m: jax.jit(lambda a: a @ a.T)(m).astype(jnp.int32),
    "checkpoint": lambda m: jax.checkpoint(lambda a: a @ a.T)(m).astype(jnp.int32),
    "scanned": lambda m: lax.scan(lambda c, x: (c, x @ m.T), 0, jnp.stack([m, m]))[1].astype(jnp.int32),
    "carried": lambda m: lax.scan(lambda c, x: (x @ m.T, None), jnp.zeros((2, 2)), jnp.stack([m, m]))[0],
    "counted in a loop": lambda m: lax.fori_loop(0, m[1, 0].astype(int) + 1, lambda i, c: m @ m.T, jnp.zeros((2, 2))),
    "one of two": lambda m: lax.cond(m[0, 0] > 0, lambda: m @ m.T, lambda: m @ m[::-1].T).astype(jnp.int32),
    "mapped": lambda m: jax.vmap(lambda row: (row @ m.T).astype(jnp.int32))(m),
    "the largest": lambda m: jnp.max(jnp.clip((m @ m.T).T, 0, 999)).astype(jnp.int32),
    "relu": lambda m: jax.nn.relu(m @ m.T),
}


def low_products(text: str) -> int:
    return sum("bf16>, tensor" in line for line in text.splitlines() if "dot_general" in line)


def both(function: Any, *args: Any, **settings: Any) -> list[tuple[list[Any], int]]:
    """The results of a program under autocast, and its low products: of JAX, and of StableHLO."""
    run = jax.jit(autocast(function, dtype="bfloat16", **settings))
    text = run.lower(*args).as_text()
    converted = stablehlo.autocast(jax.jit(function).lower(*args), dtype="bfloat16", **settings)
    found = module_runs.run(converted.module, list(map(np.asarray, args)))
    return [(jax.tree.leaves(run(*args)), low_products(text)), (found, low_products(converted.text()))]


@pytest.mark.parametrize("name", EXACT)
def test_float32_sums_are_read(name: str) -> None:
    function = EXACT[name]
    expected = jax.tree.leaves(function(M))
    for found, low in both(function, M):
        assert low > 0
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def products(function: Any, *args: Any) -> list[str]:
    """dtypes of the results of a program's products."""
    text = str(jax.make_jaxpr(autocast(function, dtype="bfloat16"))(*args))
    return [line.split("out=")[1].strip() for line in text.splitlines() if line.strip().startswith("out=")]


def test_other_readers_get_a_low_result() -> None:
    assert products(lambda m: jnp.tanh(m @ m.T), M) == ["bfloat16"]
    assert products(lambda m: (m @ m.T).astype(jnp.bfloat16), M) == ["bfloat16"]
    assert products(lambda m: (m @ m.T, jnp.tanh(m @ m.T)), M) == ["float32", "bfloat16"]
    both = products(lambda m: (lambda c: (c > 750, c @ m))(m @ m.T), jnp.tile(M, (3, 1)))
    assert both == ["bfloat16", "float32"]  # of one product


def test_a_number_is_not_rounded_by_a_comparison() -> None:
    def function(x: Any) -> Any:
        h = jnp.abs(x @ x)
        return h @ x, h > 0.3, jax.jit(lambda h, n: h <= n)(h, 0.3), jnp.maximum(h, 0.3) @ x, h > 0.5

    jaxpr = str(jax.make_jaxpr(autocast(function, dtype="bfloat16"))(jnp.ones((8, 8))))
    assert "0.30000001192092896:f32[]" in jaxpr.split(" gt ")[1]
    assert "0.5:bf16[]" in jaxpr.split(" gt ")[2]  # which bfloat16 holds
    x = jnp.full((2, 1), 0.5) * jnp.arange(1.0, 3.0)
    low = jnp.asarray(0.30078125, jnp.bfloat16)  # the nearest number of bfloat16 to 0.3
    compared = autocast(lambda x: (x @ jnp.eye(2)).astype(jnp.bfloat16).astype(jnp.float32) > 0.3, dtype="bfloat16")
    assert bool(compared(x.at[0, 0].set(low))[0, 0])


def test_training_is_as_low_as_before() -> None:
    """A network without biases, whose logits are its result: its products stay low, and its gradients are right."""

    def logits(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x) @ w
        return x

    def loss(params: Any, x: Any, y: Any, model: Any = logits) -> Any:
        return jnp.mean((model(params, x) - y) ** 2)

    draw = np.random.default_rng(0).standard_normal
    params = [draw((32, 32), np.float32) / 6 for _ in range(3)]
    x, y = draw((16, 32), np.float32), draw((16, 32), np.float32)
    low = autocast(logits, dtype="bfloat16")
    around = lambda p, x, y: loss(p, x, y, low)  # noqa: E731 - the loss outside of the region
    exact = jax.jit(jax.grad(loss))(params, x, y)
    for gradient in (jax.grad(around), jax.grad(autocast(loss)), autocast(jax.grad(loss))):
        # The last product's is the one gradient with regard to data more than three weights need.
        assert contractions(gradient, params, x, y) == {("bf16", "bf16"): 8}
        for found, expected in zip(jax.jit(gradient)(params, x, y), exact, strict=True):
            assert found.dtype == jnp.float32
            assert float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)) < 0.01
    results = products(jax.grad(loss), params, x, y)
    assert results.count("float32") == 3  # the gradients of weights


# Loops that end when a float has become small end as without autocast; others stay low.

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


@pytest.mark.parametrize("function", [directly, by_a_boolean, by_a_count, by_an_inner_scan, by_a_gradient, lanes])
def test_loops_with_a_tolerance_end(function: Any) -> None:
    expected = function(W, X)
    assert jnp.max(expected) < MOST / 2
    for (found,), low in both(function, W, X):
        np.testing.assert_array_equal(found, expected)
        assert low == 0


@pytest.mark.parametrize(("function", "products"), [(counted, 1), (in_time, 1), (until_a_token, 2)])
def test_loops_that_count_stay_low(function: Any, products: int) -> None:
    for (found,), low in both(function, W, X):
        np.testing.assert_allclose(found, function(W, X), atol=0.01)
        assert low == products


def test_what_is_around_such_a_loop_stays_low() -> None:
    def steps(w: Any, x: Any) -> Any:
        return lax.fori_loop(0, 2, lambda i, s: (jnp.tanh(s[0] @ w), s[1] + directly(w, s[0])), (x, 0))[1]

    for (found,), low in both(steps, W, X):
        assert abs(int(found) - int(steps(W, X))) <= 2
        assert low == 1


def test_rules_and_the_reason() -> None:
    assert [low for _, low in both(directly, W, X, rules={"while_loop": "low"}, strict=True)] == [1, 1]
    assert [low for _, low in both(counted, W, X, rules={"while_loop": "fp32"}, strict=True)] == [0, 0]
    with pytest.warns(RuleWarning, match=r"tanh = low.*while_loop = low lets them"):
        assert autocast(directly, dtype="bfloat16", rules={"tanh": "low"})(W, X) == directly(W, X)
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


def _pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (2, 2), "SAME")


POOLED: dict[str, tuple[Any, str]] = {
    "one product reads it": (lambda h, w: (_pooled(h) @ w).sum(), "bf16"),
    "two products, of which one moves and picks elements": (
        lambda h, w: (_pooled(h) @ w).sum() + (jnp.maximum(_pooled(h), 0).T[:, :2].T @ w).sum(),
        "bf16 bf16",
    ),
    "a product in a function": (
        lambda h, w: jax.jit(lambda a: jax.checkpoint(lambda b: b @ w)(a))(_pooled(h)).sum(),
        "bf16",
    ),
    "the caller reads it, too": (lambda h, w: (lambda p: ((p @ w).sum(), p))(_pooled(h)), "f32"),
    "a residual stream": (lambda h, w: (lambda p: (p + p @ w).sum())(_pooled(h)), "f32"),
    "compared with what was pooled": (
        lambda h, w: (jnp.where(_pooled(h)[:, :1] == h[:1, :1], 1, 0.5) @ w[:1]).sum(),
        "f32",
    ),
    "what was pooled is read, too": (lambda h, w: (_pooled(h) @ w).sum() + h.sum(), "f32"),
    "a product that asks for float32": (lambda h, w: jnp.matmul(_pooled(h), w, precision="highest").sum(), "f32"),
}


@pytest.mark.parametrize("name", POOLED)
def test_what_is_pooled_for_products_only_is_rounded_first(name: str) -> None:
    function, dtypes = POOLED[name]
    x, w = (jax.random.normal(jax.random.key(i), (16, 8 + 8 * i)) for i in range(2))
    square = jax.random.normal(jax.random.key(2), (8, 8))

    def program(x: Any, w: Any) -> Any:
        return function(jnp.exp(x @ w), square)

    def dtypes_of(**settings: Any) -> str:
        text = str(jax.make_jaxpr(autocast(program, dtype="bfloat16", **settings))(x.T, w))
        return " ".join(line.split(":")[1].split("[")[0] for line in text.splitlines() if "= reduce_window_max" in line)

    assert dtypes_of() == dtypes
    assert "bf16" not in dtypes_of(rules={"max_pool1d": "fp32"})
    assert "bf16" not in dtypes_of(rules={"matmul": "fp32"})


def test_rounding_before_a_maximum_changes_no_bit() -> None:
    x, w = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2))

    def program(x: Any, w: Any, also: bool) -> Any:
        pooled = _pooled(jnp.exp(x @ w))
        return pooled @ w[:8], pooled if also else 0

    run = jax.jit(autocast(program, dtype="bfloat16"), static_argnums=2)
    np.testing.assert_array_equal(run(x, w, False)[0], run(x, w, True)[0])
