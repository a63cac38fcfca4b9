"""The same step on torch_xla and on the lazy JAX device: equal losses, scales and decisions.

The lazy device needs another torch than torch_xla does, so its side is stored in same_step.json, which
tests/backends/test_same_step.py holds against what the lazy device does.  examples/mnist.py runs unchanged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import same_step
from same_step import POLICIES, STORED
from source_tree import ROOT


@pytest.fixture(scope="module")
def stored():
    return json.loads(STORED.read_text())


@pytest.mark.parametrize("precision", list(POLICIES))
def test_the_same_step(stored, precision):
    mine, other = same_step.run(precision), stored[precision]
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    assert mine["losses"] == pytest.approx(other["losses"], rel=tolerance)
    assert mine["scale"] == other["scale"]
    assert mine["decisions"] == other["decisions"]
    assert bool(mine["decisions"]) == (precision != "fp32")


def test_the_example():
    """Its own counts; those of torch_xla for such steps are in test_xla_scaling.py."""
    environment = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    flags = ["--json", "--epochs=2", "--precision=fp16", "--policy=gpu", "--optimizer=adam"]
    command = [sys.executable, ROOT / "examples" / "mnist.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    assert "xla:0 (CPU)" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["executions_per_step"], found["host_syncs_per_step"]) == (1, 0)
    assert found["accuracy"] > 0.8
