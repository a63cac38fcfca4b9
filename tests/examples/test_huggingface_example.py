"""The Trainer's example in a new process: it learns, logs, and resumes from its checkpoint with equal results."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import forked
import pytest
from source_tree import ROOT

pytest.importorskip("transformers", reason="the extra `huggingface`")

SMALL = ["--layers=1", "--width=32", "--context=16", "--batch-size=8", "--log-steps=2", "--lr=0.01", "--json"]


def run(*flags: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = forked.run(ROOT / "examples" / "huggingface.py", *flags, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def results(*flags: str) -> dict[str, object]:
    return json.loads(run(*SMALL, *flags).splitlines()[-1])


@pytest.mark.full
def test_it_learns_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    flags = ["--precision=fp16", "--steps=30", "--save-steps=24", f"--output={tmp_path / 'run'}"]
    whole = results(*flags, f"--log-dir={tmp_path / 'logs'}")
    assert whole["device"] == "jax:0"
    assert whole["last_loss"] < whole["first_loss"] - 1
    with open(tmp_path / "logs" / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(2, 31, 2))
    assert float(rows[-1]["loss_scale"]) == whole["loss_scale"]
    assert list((tmp_path / "logs").glob("events*"))

    shutil.rmtree(tmp_path / "run" / "checkpoint-30")
    resumed = results(*flags)
    assert resumed["resumed_from"] == "checkpoint-24"
    assert [resumed[name] for name in ("last_loss", "held_out_loss")] == [
        whole[name] for name in ("last_loss", "held_out_loss")
    ]
