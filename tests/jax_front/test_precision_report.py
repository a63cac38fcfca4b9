"""`autocast(f).report` and `explain().precision()`: the numbers are those of the program, and analyses are linear."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
import torch
from jax import lax

import xla_amp
from xla_amp.jax import autocast

W, X = jnp.ones((64, 64)), jnp.ones((256, 64))


def model(w):
    with jax.named_scope("first"):
        h = jnp.tanh(X @ w)
    with jax.named_scope("head"):
        return jnp.sum(jax.nn.log_softmax(h @ w))


def test_a_function_of_jax():
    report = autocast(model).report(W)
    assert [(line.record.operation, line.dtype, line.record.module) for line in report.low] == [
        ("matmul", "bfloat16", "first"),
        ("matmul", "bfloat16", "head"),
    ]
    assert all(line.record.location.startswith(__file__) for line in report.low)
    assert report.float32 == ()
    assert {line.record.operation for line in report.float32_regions} & {"exp", "sum", "sum.dim_IntList"}
    assert all(
        line.dtype == "float32" and line.record.module and line.record.location and line.record.why
        for line in report.float32_regions
    )
    total = report.scopes[-1]
    assert (total.name, total.low, total.float32, total.casts) == ("total", 2, 0, sum(report.casts.values()))
    assert sum(scope.low for scope in report.scopes[:-1]) == 2
    assert report.saved.plain >= 3 * X.size * 4
    assert report.saved.autocast < report.saved.plain
    for word in ("matmul", "bfloat16", "head", "total", "float32->bfloat16", f"{report.saved.autocast} bytes"):
        assert word in str(report)
    assert str(report) == report.page().text()
    assert report.page().title == "2 of 2 products and convolutions run low"


def test_contractions_that_stay_float32_and_steps():
    with xla_amp.policy.override({"matmul": "fp32"}):
        report = autocast(model).report(W)
    assert (len(report.low), sum(line.count for line in report.float32)) == (0, 2)
    step = autocast(jax.jit(lambda w: w - 0.1 * jax.grad(model)(w))).report(W)
    assert step.saved is None  # the backward pass is part of it
    assert step.scopes[-1].low == 5
    assert autocast(lambda n: n + 1).report(jnp.arange(3)).saved in (None, (0, 0))


def test_a_region_of_pytorch():
    layer = torch.nn.Linear(4, 4)
    with xla_amp.explain() as report, xla_amp.autocast("cpu"):
        torch.nn.functional.mse_loss(layer(torch.ones(2, 4)), torch.ones(2, 4))
    found = report.precision()
    assert [line.record.operation for line in found.low] == ["linear"]
    assert [line.record.operation for line in found.float32_regions] == ["mse_loss"]
    assert found.scopes[-1][1:] == (1, 0, 1, 4)


def test_lines_are_the_users_not_those_of_a_library_of_layers():
    linen = pytest.importorskip("flax.linen")
    nnx = pytest.importorskip("flax.nnx")

    class Written(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(4)(linen.LayerNorm()(x))  # line of both

    class Stateful(nnx.Module):
        def __init__(self):
            self.head = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.head(x)  # line of nnx

    x = jnp.ones((2, 8))
    shapes, model = jax.eval_shape(Written().init, jax.random.key(0), x), Stateful()
    variables = jax.tree.map(lambda each: jnp.ones(each.shape), shapes)
    lines = Path(__file__).read_text().splitlines()
    for call, line, module in (
        (lambda: autocast(Written().apply)(variables, x), "# line of both", "Written.Dense_0"),
        (lambda: autocast(lambda model, x: model(x))(model, x), "# line of nnx", "head"),
    ):
        with xla_amp.explain() as report:
            call()
        rows = report.rows()
        assert {row["location"] for row in rows} == {f"{__file__}:{[line in each for each in lines].index(True) + 1}"}
        assert module in {row["module"] for row in rows}


# Functions that call functions twice: what autocast does grows with the number of functions, not of calls.

SMALL = jnp.ones((4, 8)), jnp.ones((8, 8)) / 8


def in_a_while(function: Any) -> Any:
    def run(x: Any, w: Any) -> Any:
        return lax.while_loop(lambda s: jnp.max(s[0]) > 1e-3, lambda s: (function(s[0], w), s[1] + 1), (x, 0))[0]

    return run


AROUND: dict[str, Any] = {
    "jit": lambda f: f,
    "gelu": lambda f: lambda x, w: jax.nn.gelu(f(x, w)),
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0],
    "while": in_a_while,
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > 0, lambda x: f(x, w), lambda x: x, x),
}


def nested(around: Any, depth: int) -> Any:
    """A function that calls a product 2 ** depth times, by `depth` functions."""
    function = lambda x, w: jnp.tanh(x @ w)  # noqa: E731 - one of many
    for _ in range(depth):
        inner = jax.jit(around(function))
        function = lambda x, w, inner=inner: inner(inner(x, w), w)  # noqa: E731
    return function


def traced(function: Any, **settings: Any) -> int:
    """How many functions of the package autocast calls while it traces."""
    closed = autocast(function, dtype="bfloat16", **settings)
    return len(calls.of(lambda: jax.make_jaxpr(closed)(*SMALL)))


def test_each_thing_is_asked_once_a_program() -> None:
    def five(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w + b).sum()

    jax.jit(autocast(five))(X, W, W[0])
    again = jax.jit(autocast(five))
    made = calls.of(lambda: again(X, W, W[0]))
    assert len(made) <= 400  # of Python functions
    assert "xla_amp/policy/resolve.py:overridden" not in made


@pytest.mark.parametrize("residual", ["keep", "low"])
@pytest.mark.parametrize("name", AROUND)
def test_each_function_is_analysed_once(name: str, residual: str) -> None:
    counts = [traced(nested(AROUND[name], depth), residual=residual) for depth in (2, 3, 4, 5, 6)][1:]
    steps = [after - before for before, after in itertools.pairwise(counts)]
    if name == "while":  # the end of a loop is looked for in the loops inside of it, too
        steps = [after - before for before, after in itertools.pairwise(steps)]
    assert len(set(steps)) == 1, counts


@pytest.mark.full
def test_a_report_has_every_call_and_traces_each_function_once() -> None:
    function = nested(AROUND["jit"], 12)
    report = autocast(function, dtype="bfloat16").report(*SMALL)
    (product,) = report.low
    assert product.count == 2**12
