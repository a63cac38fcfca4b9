"""A step of a GPT compiled for two hosts of 8 H100s and for a v5p 2x2x4 that are not here: collectives and memory."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import forked
import pytest
import targets
from test_spmd_targets import collectives

from xla_amp.lazy.programs import pjrt

PROGRAM = Path(__file__).with_name("many_hosts_program.py")
PLATFORMS = {"h100": "gpu", "v5p": "tpu"}
DEVICES, TOKENS, WIDTH = 16, 64, 128


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")

    @functools.cache
    def written():
        done = forked.run(PROGRAM, folder, environment={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=800)
        assert done.returncode == 0, done.stderr
        return int((folder / "split").read_text())

    with targets.Compilers() as compilers:

        @functools.cache
        def compile_for(target):
            if not targets.available(target):
                pytest.skip(f"the compiler for {target} is not installed")
            split, platform = written(), PLATFORMS[target]
            program = (folder / f"{platform}.mlir").read_text()
            return compilers.compile(program, target, pjrt.compiler_options(platform)), split

        yield compile_for


def test_each_weight_is_gathered_once_in_bfloat16_and_its_gradient_scattered_in_float32_on_h100(compiled):
    program, split = compiled("h100")
    found = collectives(program.hlo)  # elements
    positions = TOKENS * WIDTH  # wpe is added in float32
    assert 0.9 * (split - positions) <= found["all-gather", "bf16"] <= split - positions
    assert found["reduce-scatter", "f32"] >= 0.9 * (split - positions) / DEVICES


@pytest.mark.parametrize("target", ["h100", pytest.param("v5p", marks=pytest.mark.full)])
def test_a_device_holds_its_part_and_no_other_devices_activations(compiled, target):
    program, split = compiled(target)
    state = 3 * 4 * split / DEVICES  # weight and two moments in float32
    assert state <= program.argument_memory <= 1.5 * state
    gathered = collectives(program.hlo)["all-gather", "f32"]
    assert gathered < DEVICES * TOKENS * WIDTH  # of a table that is split by rows, every row of every device
