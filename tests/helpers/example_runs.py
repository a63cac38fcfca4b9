"""The examples in new processes: their results, which are the JSON on the last line, and their logs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import forked
from source_tree import ROOT


def run(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A run of ``examples/NAME.py`` on one thread: the data is small, and other tests may be running."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = forked.run(ROOT / "examples" / f"{name}.py", *flags, environment=environment)
    assert done.returncode == 0, done.stderr
    return done


def results(name: str, *flags: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(name, *flags, "--json").stdout.splitlines()[-1])
    return found


def rows(path: Path) -> list[dict[str, str]]:
    """Of a log in CSV."""
    with open(path) as file:
        return list(csv.DictReader(file))
