"""The Trainer's example in a new process: it learns, logs, and resumes from its checkpoint with equal results."""

from __future__ import annotations

import shutil
from pathlib import Path

import example_runs
import pytest

pytest.importorskip("transformers", reason="the extra `huggingface`")

SMALL = ["--layers=1", "--width=32", "--context=16", "--batch-size=8", "--log-steps=2", "--lr=0.01"]


@pytest.mark.full
def test_it_learns_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    flags = [*SMALL, "--precision=fp16", "--steps=30", "--save-steps=24", f"--output={tmp_path / 'run'}"]
    whole = example_runs.results("huggingface", *flags, f"--log-dir={tmp_path / 'logs'}")
    assert whole["device"] == "jax:0"
    assert whole["last_loss"] < whole["first_loss"] - 1
    rows = example_runs.rows(tmp_path / "logs" / "log.csv")
    assert [int(row["step"]) for row in rows] == list(range(2, 31, 2))
    assert float(rows[-1]["loss_scale"]) == whole["loss_scale"]
    assert list((tmp_path / "logs").glob("events*"))

    shutil.rmtree(tmp_path / "run" / "checkpoint-30")
    resumed = example_runs.results("huggingface", *flags)
    assert resumed["resumed_from"] == "checkpoint-24"
    assert [resumed[name] for name in ("last_loss", "held_out_loss")] == [
        whole[name] for name in ("last_loss", "held_out_loss")
    ]
