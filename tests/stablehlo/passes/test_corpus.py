"""Whole programs: each converts, verifies, compiles, runs, and agrees with the float32 program, with few casts."""

from __future__ import annotations

import checks
import corpus
import jax
import module_runs
import numpy as np
import pytest

from xla_amp.jax import autocast as jax_autocast
from xla_amp.stablehlo import autocast, ir


@pytest.mark.parametrize("name", corpus.CASES)
def test_program(name: str) -> None:
    case = corpus.CASES[name]
    given = corpus.lowered(case).compiler_ir("stablehlo")
    before = ir.bytecode(given)
    converted = autocast(given)
    assert ir.bytecode(given) == before
    assert ir.signature(converted.module) == ir.signature(given)

    assert len(checks.wide_contractions(converted.module)) == case.asked
    assert len(checks.contractions(converted.module)) >= case.contractions
    assert list(checks.low_denied(converted.module, "tpu")) == []

    theirs = jax.jit(jax_autocast(case.function), keep_unused=True).lower(*case.arguments)
    count = checks.casts(theirs.compiler_ir("stablehlo"))
    assert count > 0
    # On the CPU each product of the JAX front gives float32, so that a cast of its result belongs to the product.
    assert checks.casts(converted.module) <= max(1.1 * count, count + 1)

    arguments = corpus.arrays(case)
    expected = module_runs.run(ir.copy(given), arguments)
    assert checks.error(module_runs.run(converted.module, arguments), expected) < case.tolerance
    if not module_runs.uninterpretable(converted.module):
        # The interpreter accumulates low results in the low dtype; no backend does.
        assert checks.error(module_runs.interpret(converted.module, arguments), expected) < 3 * case.tolerance


def test_checks_can_fail() -> None:
    case = corpus.CASES["block step"]
    module = ir.copy(corpus.lowered(case).compiler_ir("stablehlo"))
    assert len(checks.wide_contractions(module)) >= case.contractions
    assert list(checks.low_denied(autocast(module, rules={"exp": "low"}).module, "tpu")) != []
    exact = module_runs.run(module, corpus.arrays(case))
    assert checks.error([1.1 * each for each in exact], exact) > case.tolerance


@pytest.mark.parametrize("name", ["mlp step", "recurrent step", "block step"])
def test_float16_by_the_rules_for_gpu(name: str) -> None:
    case = corpus.CASES[name]
    assert autocast(corpus.lowered(case), policy="gpu").report.low == "bfloat16"
    converted = autocast(corpus.lowered(case), policy="gpu", dtype="float16")
    assert converted.report.low == "float16"
    assert checks.wide_contractions(converted.module) == []
    assert list(checks.low_denied(converted.module, "gpu", "f16")) == []
    expected = module_runs.run(ir.copy(corpus.lowered(case).compiler_ir("stablehlo")), corpus.arrays(case))
    assert checks.error(module_runs.run(converted.module, corpus.arrays(case)), expected) < case.tolerance / 4


def test_results_are_those_of_the_types_it_says() -> None:
    case = corpus.CASES["mlp"]
    results = module_runs.run(autocast(corpus.lowered(case), keep_io=True).module, corpus.arrays(case))
    assert [each.dtype for each in results] == [np.dtype("float32")]
