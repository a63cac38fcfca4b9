"""`xla_amp.jax.search`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_amp
import xla_amp.jax
from xla_amp.errors import SearchError

BUDGET = {"loss": 1e-2, "gradients": 2e-2}


def loss(parameters, x):
    """The difference of two products that are nearly equal, between two harmless ones."""
    with jax.named_scope("first"):
        h = jnp.tanh(x @ parameters["first"])
    with jax.named_scope("a"):
        a = h @ parameters["a"]
    with jax.named_scope("b"):
        b = h @ (parameters["a"] * 1.01)
    with jax.named_scope("last"):
        return jnp.mean(((a - b) @ parameters["last"]) ** 2)


def given(seed: int, number: int) -> list[tuple[dict[str, jax.Array], jax.Array]]:
    draw, weights = np.random.default_rng(seed), np.random.default_rng(0)
    parameters = {name: jnp.asarray(weights.normal(size=(32, 32)) / 6, jnp.float32) for name in ("first", "a", "last")}
    return [(parameters, jnp.asarray(draw.normal(size=(8, 32)), jnp.float32)) for _ in range(number)]


@pytest.fixture(scope="module")
def found():
    return xla_amp.jax.search(loss, given(1, 5), budget=BUDGET)


def test_both_nearly_equal_products_in_scopes_stay_in_float32(found):
    assert found.met
    names = ("first", "a", "b", "last")
    casts = [found.policy.decide("matmul", name).cast for name in names]
    assert casts == ["low", "fp32", "fp32", "low"]


def test_new_arguments_are_within_the_budget_and_the_file_gives_the_same_results(found, tmp_path):
    found.save(tmp_path / "plan.toml")
    wide = jax.jit(jax.value_and_grad(loss))
    low = {p: xla_amp.jax.autocast(loss, policy=p) for p in (found.policy, tmp_path / "plan.toml")}
    for arguments in given(2, 3):
        value, right = wide(*arguments)
        results = [jax.jit(jax.value_and_grad(function))(*arguments) for function in low.values()]
        assert jax.tree.all(jax.tree.map(jnp.array_equal, *results))
        assert 0 < abs(results[0][0] - value) / value <= BUDGET["loss"]
        left, right = (jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(t)]) for t in (results[0][1], right))
        assert 0 < jnp.linalg.norm(left - right) / jnp.linalg.norm(right) <= BUDGET["gradients"]


def test_a_budget_that_no_low_product_meets_is_float32():
    result = xla_amp.jax.search(loss, given(1, 2), budget={"gradients": 1e-9})
    assert result.errors["gradients"] == 0
    assert result.met


def test_a_number_is_a_budget_for_the_loss():
    result = xla_amp.jax.search(loss, given(1, 2), budget=0.9)
    assert result.found.budget == {"loss": 0.9}
    assert list(result.errors) == ["loss", "gradients"]
    assert len(result.found.plan) == len(result.candidates)


def test_a_function_of_arrays_is_compared_by_its_results():
    rows = [(jnp.full((8, 8), 1.0 + 0.01 * i), 3) for i in range(3)]
    result = xla_amp.jax.search(lambda x, n: {"y": x @ x / n, "n": n}, rows, budget=0.1)
    assert list(result.errors) == ["output"]
    assert 0 < result.errors["output"] <= 0.1


def _inside(x):
    return xla_amp.jax.autocast(lambda x: jnp.sum(x @ x), policy="tpu")(x)


@pytest.mark.parametrize(
    ("function", "rows", "arguments", "words"),
    [
        (jnp.sum, [], {}, "no arguments"),
        (jnp.sum, [jnp.ones(2)], {}, "give two or more different batches"),
        (jnp.sum, [jnp.ones(2)] * 3, {"low": "float8"}, "expected one of bfloat16, float16"),
        (lambda x: x > 0, [jnp.ones(2)] * 3, {}, "returns no floating array"),
        (lambda x: jnp.sum(x / 0), [jnp.ones(2)] * 3, {}, "batch 0: the loss is not finite in float32"),
        (_inside, [jnp.ones((2, 2))] * 3, {}, r"opens an autocast region \(policy tpu\)"),
    ],
)
def test_functions_that_cannot_be_searched(function, rows, arguments, words):
    with pytest.raises(SearchError, match=words):
        xla_amp.jax.search(function, rows, **{"budget": 0.1, **arguments})


def test_what_computes_in_float32_inside_is_no_candidate():
    def function(x):
        return jax.nn.softmax(x @ x) @ x

    rows = [jax.random.normal(jax.random.key(i), (8, 8)) for i in range(3)]
    result = xla_amp.jax.search(function, rows, budget=1e-7)
    assert [each.operation for each in result.candidates] == ["dot_general"]
    assert result.found.plan == frozenset()
    assert {row[0] for row in result.page().sections[-1].table.rows} == {"float32"}
    assert "0 of 1 candidates in bfloat16" in str(result)
