"""Functions that call functions twice: what autocast does grows with the number of functions, not of calls."""

from __future__ import annotations

import itertools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xla_amp
from xla_amp.jax import autocast

X, W = jnp.ones((4, 8)), jnp.ones((8, 8)) / 8
PACKAGE = str(pathlib.Path(xla_amp.__file__).parent)


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


def calls(function: Any, **settings: Any) -> int:
    """How many functions of the package autocast calls while it traces."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    closed = autocast(function, dtype="bfloat16", **settings)
    sys.setprofile(profile)
    try:
        jax.make_jaxpr(closed)(X, W)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("residual", ["keep", "low"])
@pytest.mark.parametrize("name", AROUND)
def test_each_function_is_analysed_once(name: str, residual: str) -> None:
    counts = [calls(nested(AROUND[name], depth), residual=residual) for depth in (2, 3, 4, 5, 6)][1:]
    steps = {after - before for before, after in itertools.pairwise(counts)}
    assert len(steps) == 1, counts


@pytest.mark.full
def test_a_report_has_every_call_and_traces_each_function_once() -> None:
    function = nested(AROUND["jit"], 12)
    report = autocast(function, dtype="bfloat16").report(X, W)
    (product,) = report.low
    assert product.count == 2**12
