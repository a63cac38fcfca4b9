"""A step of a GPT compiled for two hosts of 8 H100s and for a v5p 2x2x4 that are not here: collectives and memory."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import scenarios
import targets
from test_spmd_targets import collectives

from xla_amp.lazy.programs import pjrt

PROGRAM = Path(__file__).with_name("many_hosts_program.py")
PLATFORMS = {"h100": "gpu", "v5p": "tpu"}
DEVICES, TOKENS, WIDTH = 16, 64, 128


@pytest.fixture(scope="module")
def compiled():
    @functools.cache
    def written():
        return scenarios.run(PROGRAM, "texts", world=1, devices=DEVICES)["texts"][0]

    with targets.Compilers() as compilers:

        @functools.cache
        def compile_for(target):
            if not targets.available(target):
                pytest.skip(f"the compiler for {target} is not installed")
            platform = PLATFORMS[target]
            options = pjrt.compiler_options(platform)
            return compilers.compile(written()[platform], target, options), written()["split"]

        yield compile_for


@pytest.mark.full
def test_each_weight_is_gathered_once_in_bfloat16_and_its_gradient_scattered_in_float32_on_h100(compiled):
    program, split = compiled("h100")
    found = collectives(program.hlo)  # elements
    positions = TOKENS * WIDTH  # wpe is added in float32
    assert 0.9 * (split - positions) <= found["all-gather", "bf16"] <= split - positions
    assert found["reduce-scatter", "f32"] >= 0.9 * (split - positions) / DEVICES


@pytest.mark.full
@pytest.mark.parametrize("target", ["h100", "v5p"])
def test_a_device_holds_its_part_and_no_other_devices_activations(compiled, target):
    program, split = compiled(target)
    state = 3 * 4 * split / DEVICES  # weight and two moments in float32
    assert state <= program.argument_memory <= 1.5 * state
    gathered = collectives(program.hlo)["all-gather", "f32"]
    assert gathered < DEVICES * TOKENS * WIDTH  # of a table that is split by rows, every row of every device
