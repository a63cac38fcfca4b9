"""Whole programs: each converts, verifies, compiles, runs, and agrees with the float32 program."""

from __future__ import annotations

import checks
import corpus
import module_runs
import numpy as np
import pytest

from xla_amp.stablehlo import autocast, ir

INTERPRETED = 20
"""Smallest number of corpus programs that the reference interpreter can run."""


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


@pytest.mark.parametrize("name", ["mlp step", "recurrent step", "blocks by scan, step"])
def test_float16_by_the_rules_for_gpu(name: str) -> None:
    case = corpus.CASES[name]
    converted = autocast(corpus.lowered(case), policy="gpu")
    assert converted.report.low == "float16"
    assert checks.wide_contractions(converted.module) == []
    assert list(checks.low_denied(converted.module, "gpu", "f16")) == []
    expected = module_runs.run(ir.copy(corpus.lowered(case).compiler_ir("stablehlo")), corpus.arrays(case))
    assert checks.error(module_runs.run(converted.module, corpus.arrays(case)), expected) < case.tolerance / 4


def test_interpreter_is_an_oracle_for_most() -> None:
    modules = [corpus.lowered(case).compiler_ir("stablehlo") for case in corpus.CASES.values()]
    assert sum(not module_runs.uninterpretable(module) for module in modules) >= INTERPRETED


def test_again_changes_nothing() -> None:
    converted = autocast(corpus.lowered(corpus.CASES["block step"]))
    again = autocast(converted)
    assert again.report.casts == {}
    assert checks.casts(again.module) == checks.casts(converted.module)
    assert len(again.text().splitlines()) == len(converted.text().splitlines())


def test_results_are_those_of_the_types_it_says() -> None:
    case = corpus.CASES["mlp"]
    results = module_runs.run(autocast(corpus.lowered(case), keep_io=True).module, corpus.arrays(case))
    assert [each.dtype for each in results] == [np.dtype("float32")]
