"""Fully sharded weights under the cast fp8: each front's step, compiled for eight H100s, gathers them in 8 bits."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path

import forked
import pytest
import targets
from test_spmd_targets import collectives

PROGRAM = Path(__file__).with_name("float8_gather_program.py")
FRONTS = ("jax", "torch")
WEIGHTS = 2 * 64 * 96


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder with the programs, and how far the results of eight devices are from those of one."""
    folder = tmp_path_factory.mktemp("programs")
    done = forked.run(PROGRAM, folder)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def gathered(hlo: str) -> dict[str, int]:
    """Elements of the results of all-gathers by dtype."""
    found: collections.Counter[str] = collections.Counter()
    for results in re.findall(r"= (.*?) all-gather(?:-done)?\(", hlo):
        for dtype, rows, columns in re.findall(r"(\w+)\[(\d+),(\d+)\]", results):
            found[dtype] += int(rows) * int(columns)
    return dict(found)


@pytest.mark.full
def test_weights_are_gathered_in_8_bits(written) -> None:
    if not targets.available("h100"):
        pytest.skip("the compiler for h100 is not installed")
    with targets.Compilers() as compilers:
        for front in FRONTS:
            hlo = compilers.compile((written[0] / f"{front}.mlir").read_text(), "h100").hlo
            # Both forward, and again the second one, whose product gives the data its gradient.
            assert gathered(hlo) == {"f8e4m3fn": WEIGHTS + 64 * 96}, front
            # Gradients of weights are added in float32, as without the cast.
            assert collectives(hlo)["all-reduce", "bf16"] < 64, front


@pytest.mark.full
@pytest.mark.parametrize("front", FRONTS)
def test_values_are_those_of_one_device(written, front: str) -> None:
    result, *gradients = written[1][front]
    assert result == 0
    assert max(gradients) < 1e-5  # sums over rows, in another order
