"""Whole programs: each converts, verifies, compiles, runs, and agrees with the float32 program, with few casts."""

from __future__ import annotations

from typing import Any

import checks
import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest
from traced_functions import TABLE, Row

from xla_amp.jax import autocast as jax_autocast
from xla_amp.stablehlo import autocast, ir

ROWS = {row.name: row for row in TABLE if row.name != "flash_attention"}  # in StableHLO it is no kernel


def step(row: Row) -> Any:
    return jax.value_and_grad(lambda p, x: jnp.mean(row.function(p, x) ** 2))


def arguments(row: Row) -> tuple[Any, Any]:
    random = np.random.RandomState(0)
    return row.weights(random), row.x(random)


def lowered(function: Any, row: Row) -> Any:
    """The module of a function; no argument is dropped."""
    return jax.jit(function, keep_unused=True).lower(*arguments(row)).compiler_ir("stablehlo")


def run(module: Any, row: Row) -> list[np.ndarray[Any, Any]]:
    return module_runs.run(module, jax.tree.leaves(arguments(row)))


@pytest.mark.parametrize("name", ROWS)
def test_program(name: str) -> None:
    row = ROWS[name]
    given = lowered(step(row), row)
    before = ir.bytecode(given)
    converted = autocast(given)
    assert ir.bytecode(given) == before
    assert ir.signature(converted.module) == ir.signature(given)

    assert bool(checks.wide_contractions(converted.module)) <= bool(row.wide)
    assert checks.contractions(converted.module)
    assert list(checks.low_denied(converted.module, "tpu")) == []

    count = checks.casts(lowered(jax_autocast(step(row)), row))
    assert count > 0
    # On the CPU each product of the JAX front gives float32, so that a cast of its result belongs to the product.
    assert checks.casts(converted.module) <= max(1.1 * count, count + 1)

    expected = run(ir.copy(given), row)
    assert checks.error(run(converted.module, row), expected) < 2 * row.tolerance
    if not module_runs.uninterpretable(converted.module):
        # The interpreter accumulates low results in the low dtype; no backend does.
        interpreted = module_runs.interpret(converted.module, jax.tree.leaves(arguments(row)))
        assert checks.error(interpreted, expected) < 6 * row.tolerance


def test_checks_can_fail() -> None:
    row = ROWS["masked_attention"]
    module = ir.copy(lowered(step(row), row))
    assert checks.wide_contractions(module)
    assert list(checks.low_denied(autocast(module, rules={"exp": "low"}).module, "tpu")) != []
    exact = run(module, row)
    assert checks.error([1.1 * each for each in exact], exact) > 2 * row.tolerance


@pytest.mark.parametrize("name", ["lstm", "masked_attention"])
def test_float16_by_the_rules_for_gpu(name: str) -> None:
    row = ROWS[name]
    given = lowered(step(row), row)
    assert autocast(given, policy="gpu").report.low == "bfloat16"
    converted = autocast(given, policy="gpu", dtype="float16")
    assert converted.report.low == "float16"
    assert checks.wide_contractions(converted.module) == []
    assert list(checks.low_denied(converted.module, "gpu", "f16")) == []
    assert checks.error(run(converted.module, row), run(ir.copy(given), row)) < row.tolerance / 4
