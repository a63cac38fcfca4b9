"""The training steps of benchmarks/jax_autocast.py, of a transformer block, cross-compiled for TPU v6e and H100."""

from __future__ import annotations

import functools

import hlo_text
import jax_autocast
import pytest
import targets

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # three compilations for TPU, on a machine that may be busy
OURS = ("autocast(loss)", "autocast(step)")


@pytest.fixture(scope="module")
def compiled(compile_for):
    steps, weights, x = jax_autocast.steps_of_a_block()
    return functools.cache(
        lambda target, name: compile_for(targets.lower(steps[name], weights, x, target=target), target)
    )


def test_on_v6e_it_costs_what_the_hand_written_model_costs(compiled):
    by_hand, wide = (compiled("v6e", each) for each in ("Flax dtype=bfloat16", "float32"))
    for name in OURS:
        ours = compiled("v6e", name)
        for quantity in ("seconds", "bytes_accessed"):
            assert getattr(ours, quantity) <= 1.02 * getattr(by_hand, quantity), name
            assert getattr(ours, quantity) <= 0.75 * getattr(wide, quantity), name
        assert {dtypes[:2] for dtypes in ours.contractions()} == {("bfloat16", "bfloat16")}, name


@pytest.mark.parametrize("name", OURS)
def test_on_h100_every_product_is_low_and_weights_get_float32(compiled, name):
    ours = compiled("h100", name).contractions()
    wide = compiled("h100", "float32").contractions()
    assert {dtypes[:2] for dtypes in ours} == {("bfloat16", "bfloat16")}
    assert sum(ours.values()) == sum(wide.values()) == 20
    assert ours["bfloat16", "bfloat16", "float32"] == 6  # q, k, v, out, two dense layers


def test_on_h100_a_gradient_that_a_product_reads_is_written_low_only(compiled):
    def written(name):
        entry = compiled("h100", name).hlo.partition("\nENTRY ")[2]
        made = [each for each in hlo_text.instructions(entry) if each.operation == "fusion"]
        return sum("f32[8,256,2048]" in each.type.replace("bf16", "") for each in made)

    assert written("autocast(loss)") == 1  # gelu's tanh, which the backward pass reads
    assert written("float32") > 1
