"""The first command of the README, with a small model."""

from __future__ import annotations

import json

import example_runs
import pytest
from source_tree import ROOT


@pytest.mark.full
def test_the_demo_compares_float32_and_bfloat16():
    done = example_runs.run("demo", "--width", "64", "--steps", "4", "--json")
    lines = done.stdout.splitlines()
    results = next(json.loads(line) for line in lines if line.startswith("{"))
    assert results["executables_per_step"] == 1
    assert results["bfloat16_loss"] == pytest.approx(results["float32_loss"], rel=1e-2)
    assert results["ran_in_bfloat16"] == "linear (17), scaled_dot_product_attention (4)"
    assert lines[0].startswith("This CPU")
    commands = [line.split()[1:] for line in lines if line.startswith("  python ")]
    assert len(commands) == 3
    for command in commands:
        assert command[0] == "-m" or (ROOT / command[0]).is_file()
