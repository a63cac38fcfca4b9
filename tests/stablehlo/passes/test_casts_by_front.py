"""Number of casts that the pass inserts, compared with the JAX front."""

from __future__ import annotations

import checks
import corpus
import jax
import pytest

from xla_amp import jax as jax_front
from xla_amp.stablehlo import autocast


@pytest.mark.parametrize("name", corpus.CASES)
def test_no_more_casts_than_the_jaxpr_front(name: str) -> None:
    case = corpus.CASES[name]
    theirs = jax.jit(jax_front.autocast(case.function), keep_unused=True).lower(*case.arguments)
    count = checks.casts(theirs.compiler_ir("stablehlo"))
    assert count > 0
    # On the CPU each product of the front gives float32, so that a cast of its result belongs to the product.
    assert checks.casts(autocast(corpus.lowered(case)).module) <= max(1.1 * count, count + 1)
