"""Each example prints its flags for ``--help``, which is no error."""

from __future__ import annotations

import subprocess
import sys

import pytest
from source_tree import ROOT

MODULES = ("common.py", "small_gpt2.py")
"""What the examples import."""
ARGPARSE = ("gpt_ddp.py",)
"""Scripts for CUDA with two lines changed, which use nothing of the other examples."""


@pytest.mark.exhaustive
def test_help_is_no_error() -> None:
    paths = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in MODULES]
    commands = [[sys.executable, path, "--help"] for path in paths]
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    assert len(runs) >= 6
    for path, run in zip(paths, runs, strict=True):
        out, error = run.communicate(timeout=280)
        assert run.returncode == 0, (path, error)
        assert "--[no]json" in out or path.name in ARGPARSE, path
