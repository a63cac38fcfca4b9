"""On a mesh the devices' parts of the gradients of weights are added in float32, whatever dtype the products have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import scenarios
import targets
import torch
from test_spmd_targets import COLLECTIVE, collectives

from xla_amp.lazy.programs import pjrt

pytestmark = pytest.mark.processes  # of 16 virtual devices
PROGRAM = Path(__file__).with_name("gradient_sums_program.py")
WEIGHTS = 16 * 4 * 9 + 16 + 256 * 256 + 256 + 128 * 256 + 128 + 32 * 128 + 32
TABLE, ROWS, IMAGES = 64 * 256, 4096 * 256, 4096 * 4 * 4 * 4
"""Elements of the weights, of the table, of the rows that are looked up in it, of a batch."""
TARGETS = {"h100": "gpu", "v5e": "tpu", "v5p": "tpu"}
DEVICES = 16
"""On two hosts of GPUs, or on several of TPUs."""


def run(scenario):
    return scenarios.run(PROGRAM, scenario, world=1, devices=DEVICES)[scenario][0]


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


@pytest.fixture(scope="module")
def compiled():
    if not all(map(targets.available, TARGETS)):
        pytest.skip("the compilers are not installed")
    texts = run("programs")
    with targets.Compilers() as compilers:
        return {
            target: compilers.compile(texts[kind], target, pjrt.compiler_options(kind))
            for target, kind in TARGETS.items()
        }


@pytest.mark.full
@pytest.mark.timeout(900)
def test_sharded_weights_of_all_kinds_are_reduced_in_float32_on_h100(compiled):
    """Each is gathered once in bfloat16; of the table only the rows move that a device asks for."""
    program = compiled["h100"]
    assert collectives(program.hlo) == {
        ("all-gather", "bf16"): WEIGHTS,
        ("all-to-all", "f32"): ROWS / DEVICES,
        ("reduce-scatter", "f32"): (WEIGHTS + TABLE) / DEVICES,
        ("all-reduce", "f32"): 2,  # the loss
    }
    assert len(re.findall(COLLECTIVE, program.hlo)) == 4
    held = 4 * (WEIGHTS + TABLE + IMAGES) / DEVICES  # bytes of one device's part
    assert held <= program.argument_memory <= 1.01 * held


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["v5e", "v5p"])
def test_sharded_weights_of_all_kinds_are_reduced_in_float32_on_a_tpu(compiled, target):
    """XLA:TPU adds in rings, and gathers the filters in one, too."""
    found = collectives(compiled[target].hlo)
    assert found.pop(("collective-permute", "bf16")) == found["collective-permute", "f32"]
    assert {dtype for kind, dtype in found if kind != "all-gather"} == {"f32"}
    assert found["all-to-all", "f32"] == ROWS / DEVICES
    assert found["all-gather", "f32"] == 0
