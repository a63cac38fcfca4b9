"""Each example prints its flags for ``--help``, which is no error."""

from __future__ import annotations

import forked
import pytest
from source_tree import ROOT

MODULES = ("common.py", "small_gpt2.py")
"""What the examples import."""
ARGPARSE = ("gpt_ddp.py",)
"""Scripts for CUDA with two lines changed, which use nothing of the other examples."""


@pytest.mark.full
def test_help_is_no_error() -> None:
    paths = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in MODULES]
    assert len(paths) >= 6
    for path in paths:
        run = forked.run(path, "--help")
        assert run.returncode == 0, (path, run.stderr)
        assert "--[no]json" in run.stdout or path.name in ARGPARSE, path
