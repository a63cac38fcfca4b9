"""XLA:TPU's estimates for a transformer block's training step, before and after the pass.

A block as GPT-2's (pre-norm, causal attention, GELU) of width 512 with 8 heads, batch 8, length 256: loss and gradients
of all parameters.  The estimates are the compiler's own and do not change from run to run.
"""

from __future__ import annotations

import functools
from typing import Any

import corpus
import jax
import jax.numpy as jnp
import pytest
from targets import Compilers, available

from xla_amp.stablehlo import autocast

WIDTH, PER_HEAD, BATCH, LENGTH = 512, 64, 8, 256


def step() -> str:
    block = functools.partial(corpus.block, heads=WIDTH // PER_HEAD)

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return jnp.mean((block(parameters, x) - y) ** 2)

    parameters = jax.eval_shape(lambda: corpus.block_parameters(WIDTH))
    data = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    return str(jax.jit(jax.value_and_grad(loss)).lower(parameters, data, data).as_text())


@pytest.mark.full
def test_step_of_a_block_on_v6e() -> None:
    if not available("v6e"):
        pytest.skip("libtpu, TPU's compiler, is not installed")
    given = step()
    converted = autocast(given)
    with Compilers() as compilers:
        wide = compilers.compile(given, "v6e")
        low = compilers.compile(converted.text(), "v6e")
    assert wide.seconds is not None
    assert low.seconds is not None
    assert low.seconds <= 0.80 * wide.seconds
    assert low.bytes_accessed <= 0.80 * wide.bytes_accessed
    assert low.peak_memory < wide.peak_memory
    contractions = low.contractions()
    assert sum(contractions.values()) >= 18
    assert {kinds[:2] for kinds in contractions} == {("bfloat16", "bfloat16")}
    assert contractions != wide.contractions()
