"""The GPT example in a new process: captured steps, and resuming from a checkpoint with equal results."""

from __future__ import annotations

import example_runs
import pytest

SMALL = ["--layers=1", "--width=32", "--context=16", "--batch-size=8", "--write=4"]


@pytest.mark.full
def test_it_learns_in_captured_steps_and_resumes_from_its_checkpoint(tmp_path):
    flags = [*SMALL, "--precision=fp16", "--policy=gpu"]
    whole = example_runs.results("gpt", "--steps=80", f"--log-dir={tmp_path}", *flags)
    rows = example_runs.rows(tmp_path / "log.csv")
    assert set(rows[0]) == {"step", "loss", "lr", "loss_scale"}
    assert [int(row["step"]) for row in rows] == list(range(20, 81, 20))
    assert list(tmp_path.glob("events*"))
    assert whole["executions_per_step"] == 1
    assert whole["replayed_steps"] >= 70
    assert whole["last_loss"] < whole["first_loss"] - 1

    checkpoint = f"--checkpoint={tmp_path / 'gpt.pt'}"
    for _ in range(2):
        resumed = example_runs.results("gpt", "--steps=40", checkpoint, *flags)
    assert resumed["last_loss"] == whole["last_loss"]
    assert resumed["held_out_loss"] == whole["held_out_loss"]
