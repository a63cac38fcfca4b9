"""The same step on torch_xla and on the lazy JAX device: equal losses, scales and decisions.

The lazy device needs another torch than torch_xla does, so its side is stored in same_step.json, which
tests/backends/test_same_step.py holds against what the lazy device does.  examples/mnist.py runs unchanged.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import same_step
from same_step import POLICIES, STORED

from xla_amp.common import config


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
    ("flags", "cost"),
    [
        (["--precision=bf16", "--optimizer=sgd"], {"executions": 1, "transfers": 0}),
        (["--precision=fp16", "--policy=gpu", "--optimizer=adam"], {"executions": 1, "transfers": 0}),
        (["--precision=fp16", "--policy=gpu", "--nosyncfree", "--stock"], {"executions": 2, "transfers": 1}),
    ],
    ids=["bf16", "fp16 with a scaler", "fp16 with torch's scaler"],
)
def test_the_example(flags, cost):
    environment = config.child_environment({"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"})
    command = [sys.executable, Path(__file__).with_name("counted_example.py"), "--json", "--epochs=2", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    assert "xla:0 (CPU)" in done.stdout
    ours, theirs = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert theirs == cost  # by torch_xla's own counters
    assert (ours["executions_per_step"], ours["host_syncs_per_step"]) == (cost["executions"], cost["transfers"])
    assert ours["accuracy"] > 0.8
