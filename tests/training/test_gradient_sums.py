"""On a mesh the devices' parts of the gradients of weights are added in float32, whatever dtype the products have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import scenarios
import targets
import torch
from test_spmd_targets import COLLECTIVE, collectives

PROGRAM = Path(__file__).with_name("gradient_sums_program.py")
WEIGHTS = 8 * 4 * 9 + 8 + 256 * 128 + 256 + 128 * 256 + 128 + 32 * 128 + 32
"""Elements of the weights."""


def run(scenario):
    return scenarios.run(PROGRAM, scenario, world=1, devices=16)[scenario][0]


@pytest.fixture(scope="module")
def numbers():
    return run("numbers")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_that_cancel_leave_the_rest(numbers, dtype):
    """The parts of 8 devices are 256.1 and -255.9.  In bfloat16 these are 256 and -256."""
    name = str(dtype).removeprefix("torch.")
    exact = 8 * torch.tensor(0.1, dtype=dtype).item()
    for weight, values in numbers[name].items():
        twice = 2 if weight == "linear.weight" else 1
        assert values == pytest.approx([twice * exact] * len(values), rel=torch.finfo(dtype).eps), weight


def test_a_rule_leaves_the_sums_in_the_dtype_of_the_products(numbers):
    for weight in ("conv.weight", "linear.weight", "low.weight"):
        assert set(numbers["low"][weight]) == {0.0}
        assert numbers["one low"][weight] == (numbers["low"] if "linear" in weight else numbers["bfloat16"])[weight]


@pytest.fixture(scope="module")
def compiled():
    if not all(map(targets.available, ("h100", "v5e"))):
        pytest.skip("the compilers are not installed")
    texts, pairs = run("programs"), (("h100", "gpu"), ("v5e", "tpu"))
    with targets.Compilers() as compilers:
        return {target: compilers.compile(texts[kind], target).hlo for target, kind in pairs}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_sharded_weights_of_all_kinds_are_reduced_in_float32_on_h100(compiled):
    found = collectives(compiled["h100"])
    assert found.pop(("all-gather", "bf16")) == WEIGHTS  # in the forward pass
    assert found == {("reduce-scatter", "f32"): WEIGHTS / 8, ("all-reduce", "f32"): 2}  # and the loss
    assert len(re.findall(COLLECTIVE, compiled["h100"])) == 3


@pytest.mark.full
@pytest.mark.timeout(900)
def test_sharded_weights_of_all_kinds_are_reduced_in_float32_on_v5e(compiled):
    """XLA:TPU adds in rings; 8 filters do not divide over 16 chips."""
    assert {dtype for kind, dtype in collectives(compiled["v5e"]) if kind != "all-gather"} == {"f32"}
