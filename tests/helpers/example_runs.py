"""The examples in new processes: their results, which are the JSON on the last line, and their logs."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import forked
from source_tree import ROOT


def run(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A run of ``examples/NAME.py`` on one thread: the data is small, and other tests may be running."""
    return forked.run(ROOT / "examples" / f"{name}.py", *flags, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def results(name: str, *flags: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(name, *flags, "--json").stdout.splitlines()[-1])
    return found


def rows(path: Path) -> list[dict[str, str]]:
    """Of a log in CSV."""
    with open(path) as file:
        return list(csv.DictReader(file))


def logged(folder: Path, steps: Iterable[int]) -> list[dict[str, str]]:
    """The rows of an example's log; asserts that they are of `steps` and that there are events for TensorBoard."""
    found = rows(folder / "log.csv")
    assert [int(row["step"]) for row in found] == list(steps)
    assert list(folder.glob("events*"))
    return found
