"""Calibration on sample inputs: operations that must stay float32, in every kind of region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest
from jax import lax

from xla_amp.stablehlo import autocast, ir
from xla_amp.stablehlo.passes.autocast import Converted

W = (np.eye(8) + 0.1 * np.random.default_rng(0).standard_normal((8, 8))).astype(np.float32)
X = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
QUIET, LOUD = 0.5 * X, 100 * X


def lowered(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(function, keep_unused=True).lower(*arguments)


def kept(converted: Converted) -> list[str]:
    """Operations that calibration keeps in float32."""
    return [each.operation for each in converted.report.operations if each.why.startswith("sample inputs")]


def plain(x: Any) -> Any:
    # Of what tanh gives, 2**14 times stays in float16's range (65504); of a hundred times as much it does not.
    return jnp.tanh((x @ W) * 2.0**14) @ W


def in_a_loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, h: plain(h), x)


def in_nested_loops(x: Any) -> Any:
    return lax.scan(lambda h, _: (lax.fori_loop(0, 2, lambda _, h: plain(h), h), None), x, None, length=2)[0]


def in_a_function(x: Any) -> Any:
    inner = jax.jit(plain)
    return inner(inner(x))


def in_a_branch(x: Any) -> Any:
    return lax.cond(x[0, 0] > -1e9, plain, lambda x: x @ W, x)


PLACES = [plain, in_a_loop, in_nested_loops, in_a_function, in_a_branch]


@pytest.mark.parametrize("function", PLACES, ids=lambda each: each.__name__)
def test_what_overflows_stays_wherever_it_is(function: Callable[..., Any]) -> None:
    program = lowered(function, X)
    converted = autocast(program, dtype="float16", sample_inputs=(LOUD,))
    assert "multiply" in kept(converted)
    decision = next(each for each in converted.report.operations if each.why.startswith("sample inputs"))
    assert "overflow float16 (6.55e+04)" in decision.why
    expected = module_runs.run(ir.copy(program.compiler_ir("stablehlo")), [LOUD])[0]
    got = module_runs.run(converted.module, [LOUD])[0]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, expected, atol=0.01)
    # The twin: nothing stays where nothing overflows.
    assert kept(autocast(program, dtype="float16", sample_inputs=(QUIET,), max_error=1.0)) == []


def test_what_loses_too_much_stays() -> None:
    def difference(x: Any) -> Any:
        a = x @ W
        return (a - a * 1.001) @ W

    program = lowered(difference, X)
    converted = autocast(program, sample_inputs=(X,))
    assert kept(converted) == ["subtract"]
    assert "wrong by" in next(e.why for e in converted.report.operations if e.operation == "subtract")
    expected = module_runs.run(ir.copy(program.compiler_ir("stablehlo")), [X])[0]

    def error(module: Any) -> float:
        return float(np.abs(module_runs.run(module, [X])[0] - expected).max() / np.abs(expected).max())

    assert error(autocast(program).module) > 0.5
    assert kept(autocast(program, sample_inputs=(X,), max_error=1e3)) == []


def test_the_worst_of_several_samples_counts() -> None:
    program = lowered(plain, X)
    quiet, loud = (QUIET,), (LOUD,)
    assert kept(autocast(program, dtype="float16", sample_inputs=[quiet, quiet])) == []
    assert "multiply" in kept(autocast(program, dtype="float16", sample_inputs=[quiet, loud]))
    assert "multiply" in kept(autocast(program, dtype="float16", sample_inputs=[loud, quiet]))


def test_nothing_is_kept_in_bfloat16_where_only_float16_overflows() -> None:
    assert kept(autocast(lowered(plain, X), sample_inputs=(LOUD,))) == []
