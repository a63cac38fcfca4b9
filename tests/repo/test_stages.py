"""What a run leaves out: the default run the crossings of a matrix, one without torch_xla the tests of that engine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from source_tree import ROOT


@pytest.mark.full
@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="nothing is left out where torch_xla is installed")
def test_what_is_left_out_is_said():
    folder = ROOT / "tests" / "torch_xla_engine"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n1", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    files = sorted(path.name for path in folder.glob("test_*.py"))
    line = f"torch_xla is not installed: {len(files)} files of tests/{folder.name} are left to scripts/torch_xla_env.sh"
    assert line in done.stdout, done.stdout
    assert all(name in done.stdout for name in files)


def collected(*options: str) -> list[list[str]]:
    """The parts of the names of a test's rows."""
    test = "tests/lowering/linalg/test_contraction.py::test_folded_transposes"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *options, test]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=ROOT, env=environment)
    return [line.partition("[")[2].rstrip("]").split("-") for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.full
def test_the_default_run_has_each_row_of_a_matrix_once():
    default, everything = collected(), collected("-m", "full or not full")
    sides = [set(side) for side in zip(*everything, strict=True)]
    assert len(everything) == math.prod(map(len, sides))
    assert [set(side) for side in zip(*default, strict=True)] == sides
    assert len(default) == max(map(len, sides))
