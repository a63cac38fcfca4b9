"""The GPT example in a new process: captured steps, and resuming from a checkpoint with equal results."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import forked
import pytest
from source_tree import ROOT

SMALL = ["--layers=1", "--width=32", "--context=16", "--batch-size=8", "--write=4", "--json"]


def results(*flags: str) -> dict[str, object]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(ROOT / "examples" / "gpt.py", *SMALL, *flags, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rows(path: Path) -> list[int]:
    """The steps of a log."""
    with open(path) as file:
        found = list(csv.DictReader(file))
    assert set(found[0]) == {"step", "loss", "lr", "loss_scale"}
    assert list(path.parent.glob("events*"))
    return [int(row["step"]) for row in found]


@pytest.mark.full
def test_it_learns_in_captured_steps_and_resumes_from_its_checkpoint(tmp_path):
    flags = ["--precision=fp16", "--policy=gpu"]
    whole = results("--steps=80", f"--log-dir={tmp_path}", *flags)
    assert rows(tmp_path / "log.csv") == list(range(20, 81, 20))
    assert whole["executions_per_step"] == 1
    assert whole["replayed_steps"] >= 70
    assert whole["last_loss"] < whole["first_loss"] - 1

    checkpoint = f"--checkpoint={tmp_path / 'gpt.pt'}"
    results("--steps=40", checkpoint, *flags)
    resumed = results("--steps=40", checkpoint, *flags)
    assert resumed["last_loss"] == whole["last_loss"]
    assert resumed["held_out_loss"] == whole["held_out_loss"]
