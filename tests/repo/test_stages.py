"""What a run without torch_xla leaves to scripts/torch_xla_env.sh, it says."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
from source_tree import ROOT

FOLDER = ROOT / "tests" / "torch_xla_engine"


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="nothing is left out where torch_xla is installed")
@pytest.mark.parametrize(
    ("argument", "workers", "said"),
    [("tests/torch_xla_engine", 0, True), ("tests/torch_xla_engine", 1, True), ("tests/test_events.py", 0, False)],
)
def test_what_is_left_out_is_said(argument, workers, said):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"-n{workers}", argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    files = sorted(path.name for path in FOLDER.glob("test_*.py"))
    line = f"torch_xla is not installed: {len(files)} files of tests/{FOLDER.name} are left to scripts/torch_xla_env.sh"
    assert (line in done.stdout) == said, done.stdout
    assert all(name in done.stdout for name in files) == said
    assert line not in done.stdout.splitlines()[-1]  # the last line is pytest's own
