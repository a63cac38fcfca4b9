"""Training steps compiled for H100s and for slices of TPUs that are not here: their collectives and their dtypes.

The devices' parts of the gradients of weights are added in float32, whatever dtype the products have.
"""

from __future__ import annotations

import collections
import functools
import re
from pathlib import Path

import pytest
import scenarios
import torch

from xla_amp.lazy.programs import pjrt

# Compilers for TPUs, on a machine that may be busy; programs are written for 16 virtual devices.
pytestmark = [pytest.mark.timeout(900), pytest.mark.processes]
DEVICES = 16
TARGETS = {"h100": ("gpu", 8), "v5e": ("tpu", 16)}
PROGRAM = Path(__file__).with_name("target_program.py")
COLLECTIVE = (
    r"= (?P<result>.*?) ?\b(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-done)?\("
)
"""Where the result of one is: of two halves the second, for the first may give its operands as well."""
WEIGHTS = 64 * 128 + 128 * 32
"""Elements of the two weights, whose gradients come from products in the low dtype."""


def run(scenario):
    return scenarios.run(PROGRAM, scenario, world=1, devices=DEVICES)[scenario][0]


@pytest.fixture(scope="module")
def compiled(compile_for):
    texts = functools.cache(lambda: run("texts"))

    @functools.cache
    def compiled(target, layout):
        program = texts()[f"{layout}-{TARGETS[target][0]}"]
        assert f"mhlo.num_partitions = {TARGETS[target][1]}" in program
        return compile_for(program, target)

    return compiled


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


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_data_parallel_reduces_gradients_and_nothing_else(compiled, target):
    found = collectives(compiled(target, "data").hlo)
    assert found == {("all-reduce", "f32"): WEIGHTS + 128 + 32 + 2}  # each gradient once, and the loss


@pytest.mark.full
@pytest.mark.parametrize(("layout", "dtype"), [("replicas", "f32"), ("replicas in bfloat16", "bf16")])
@pytest.mark.parametrize("target", TARGETS)
def test_processes_reduce_gradients_in_the_dtype_that_was_asked_for(compiled, target, layout, dtype):
    hlo = compiled(target, layout).hlo
    assert collectives(hlo) == {("all-reduce", dtype): WEIGHTS + 128 + 32}
    assert len(re.findall(COLLECTIVE, hlo)) == 2  # all gradients in one, and whether anybody overflowed


@pytest.mark.full
def test_tensor_parallel_adds_partial_products_on_h100(compiled):
    found = collectives(compiled("h100", "tensor").hlo)
    # A small product adds its bias to the float32 accumulator, so its partial results are added in float32, too.
    second = 32 // 4 * 32
    assert found == {("all-reduce", "f32"): WEIGHTS // 2 + 128 // 2 + 32 + 2 + second}


ALL_WEIGHTS = 16 * 4 * 9 + 16 + 256 * 256 + 256 + 128 * 256 + 128 + 32 * 128 + 32
TABLE, ROWS, IMAGES = 64 * 256, 4096 * 256, 4096 * 4 * 4 * 4
"""Elements of the weights, of the table, of the rows that are looked up in it, of a batch."""
SHARDED = {"h100": "gpu", "v5e": "tpu", "v5p": "tpu"}


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
def sharded(compile_for):
    texts = run("sharded_texts")
    return {target: compile_for(texts[kind], target, pjrt.compiler_options(kind)) for target, kind in SHARDED.items()}


@pytest.mark.full
def test_sharded_weights_of_all_kinds_are_reduced_in_float32_on_h100(sharded):
    """Each is gathered once in bfloat16; of the table only the rows move that a device asks for."""
    program = sharded["h100"]
    assert collectives(program.hlo) == {
        ("all-gather", "bf16"): ALL_WEIGHTS,
        ("all-to-all", "f32"): ROWS / DEVICES,
        ("reduce-scatter", "f32"): (ALL_WEIGHTS + TABLE) / DEVICES,
        ("all-reduce", "f32"): 2,  # the loss
    }
    assert len(re.findall(COLLECTIVE, program.hlo)) == 4
    held = 4 * (ALL_WEIGHTS + TABLE + IMAGES) / DEVICES  # bytes of one device's part
    assert held <= program.argument_memory <= 1.01 * held


@pytest.mark.full
@pytest.mark.parametrize("target", ["v5e", "v5p"])
def test_sharded_weights_of_all_kinds_are_reduced_in_float32_on_a_tpu(sharded, target):
    """XLA:TPU adds in rings, and gathers the filters in one, too."""
    found = collectives(sharded[target].hlo)
    assert found.pop(("collective-permute", "bf16")) == found["collective-permute", "f32"]
    assert {dtype for kind, dtype in found if kind != "all-gather"} == {"f32"}
    assert found["all-to-all", "f32"] == ROWS / DEVICES
    assert found["all-gather", "f32"] == 0
