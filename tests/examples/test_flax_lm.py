"""The Flax example in a new process: the precisions learn alike, and it logs."""

from __future__ import annotations

from pathlib import Path

import example_runs
import pytest

pytest.importorskip("flax", reason="the extra `tests`")

SMALL = ["--layers=1", "--width=32", "--context=16", "--batch-size=8", "--log-steps=10", "--lr=0.01"]


@pytest.mark.full
def test_the_precisions_learn_alike(tmp_path: Path) -> None:
    found = {}
    for precision in ("fp32", "fp16"):
        flags = [f"--precision={precision}", "--steps=120", f"--log-dir={tmp_path / precision}"]
        found[precision] = example_runs.results("flax_lm", *SMALL, *flags)
        assert found[precision]["held_out_loss"] < 3.3
        rows = example_runs.rows(tmp_path / precision / "log.csv")
        assert [int(row["step"]) for row in rows] == list(range(10, 121, 10))
        assert list((tmp_path / precision).glob("events*"))
    assert abs(found["fp32"]["held_out_loss"] - found["fp16"]["held_out_loss"]) < 0.01
    assert found["fp32"]["low_products"] == 0
    assert found["fp16"]["low_products"] >= 8  # four of attention, two of its products, two of the perceptron
    assert found["fp16"]["loss_scale"] == 65536
