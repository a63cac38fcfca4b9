"""The same step on torch_xla and on the lazy JAX device: equal losses, scales and decisions.

The lazy device needs another torch than torch_xla does, so its side is stored in same_step.json, which
tests/engines/test_same_step.py holds against what the lazy device does.  examples/mnist.py runs unchanged.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import same_step
from same_step import POLICIES, STORED

from xla_amp import config

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize(
    ("flags", "accuracy"),
    [
        (["--precision=bf16", "--optimizer=sgd"], 0.9),
        (["--precision=fp16", "--policy=gpu", "--optimizer=adam"], 0.9),
    ],
    ids=["bf16", "fp16 with a scaler"],
)
def test_the_example(flags, accuracy):
    environment = config.child_environment({"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"})
    command = [sys.executable, ROOT / "examples" / "mnist.py", "--json", "--epochs=3", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    assert "xla:0 (CPU)" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["executions_per_step"], found["host_syncs_per_step"]) == (1, 0)
    assert found["accuracy"] > accuracy
