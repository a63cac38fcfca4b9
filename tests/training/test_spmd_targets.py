"""A training step compiled for 8 H100s and for a v5e 4x4 slice that are not here: its collectives and their dtypes.

Sharded weights are in test_gradient_sums.py.
"""

from __future__ import annotations

import collections
import functools
import re
from pathlib import Path

import pytest
import scenarios
import targets

# Compilers for TPUs, on a machine that may be busy; programs are written for 16 virtual devices.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900), pytest.mark.processes]

TARGETS = {"h100": ("gpu", 8), "v5e": ("tpu", 16)}
PROGRAM = Path(__file__).with_name("target_program.py")
COLLECTIVE = (
    r"= (?P<result>.*?) ?\b(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-done)?\("
)
"""Where the result of one is: of two halves the second, for the first may give its operands as well."""
WEIGHTS = 64 * 128 + 128 * 32
"""Elements of the two weights, whose gradients come from products in the low dtype."""


@pytest.fixture(scope="module")
def compiled():
    @functools.cache
    def written():
        return scenarios.run(PROGRAM, "texts", world=1, devices=16)["texts"][0]

    with targets.Compilers() as compilers:

        @functools.cache
        def compile_for(target, layout):
            if not targets.available(target):
                pytest.skip(f"the compiler for {target} is not installed")
            program = written()[f"{layout}-{TARGETS[target][0]}"]
            assert f"mhlo.num_partitions = {TARGETS[target][1]}" in program
            return compilers.compile(program, target)

        yield compile_for


def collectives(hlo):
    """Elements of float results by (collective, dtype)."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for each in re.finditer(COLLECTIVE, hlo):
        for dtype, shape in re.findall(r"\b(bf16|f16|f32)\[([\d,]*)\]", each["result"]):
            size = 1
            for extent in filter(None, shape.split(",")):
                size *= int(extent)
            found[each["kind"], dtype] += size
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_data_parallel_reduces_gradients_and_nothing_else(compiled, target):
    found = collectives(compiled(target, "data").hlo)
    assert found == {("all-reduce", "f32"): WEIGHTS + 128 + 32 + 2}  # each gradient once, and the loss


@pytest.mark.parametrize(("layout", "dtype"), [("replicas", "f32"), ("replicas in bfloat16", "bf16")])
@pytest.mark.parametrize("target", TARGETS)
def test_processes_reduce_gradients_in_the_dtype_that_was_asked_for(compiled, target, layout, dtype):
    hlo = compiled(target, layout).hlo
    assert collectives(hlo) == {("all-reduce", dtype): WEIGHTS + 128 + 32}
    assert len(re.findall(COLLECTIVE, hlo)) == 2  # all gradients in one, and whether anybody overflowed


def test_tensor_parallel_adds_partial_products_on_h100(compiled):
    found = collectives(compiled("h100", "tensor").hlo)
    # A small product adds its bias to the float32 accumulator, so its partial results are added in float32, too.
    second = 32 // 4 * 32
    assert found == {("all-reduce", "f32"): WEIGHTS // 2 + 128 // 2 + 32 + 2 + second}
