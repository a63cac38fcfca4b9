"""The LightningModule's example in a new process: it learns, shows, logs, and goes on from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import example_runs
import pytest

pytest.importorskip("lightning", reason="the extra `lightning`")


def run(*flags: str) -> tuple[dict[str, Any], str]:
    """The results, and all that was printed."""
    done = example_runs.run("lightning_module", "--batch-size=128", "--json", *flags)
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.full
def test_it_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    flags = ["--precision=fp16", f"--output={tmp_path / 'run'}", "--log-steps=11"]
    found, shown = run(*flags, "--epochs=3", f"--log-dir={tmp_path / 'logs'}")
    assert found["device"] == "jax:0"
    assert found["accuracy"] > 0.8
    assert "loss_scale=65536.0, accuracy=" in shown
    logged = example_runs.rows(tmp_path / "logs" / "metrics.csv")
    assert {"loss", "lr", "loss_scale", "accuracy"} <= set(logged[0])
    assert [int(row["step"]) for row in logged if row["loss"]] == [10, 21, 32]
    assert list((tmp_path / "logs").glob("events*"))

    early = min((tmp_path / "run").glob("epoch=*.ckpt"))
    early.replace(tmp_path / "run" / "last.ckpt")
    again, _ = run(*flags, "--epochs=3", f"--log-dir={tmp_path / 'again'}")
    assert again["resumed_from"] == "last.ckpt"
    assert again["steps"] == found["steps"] == 33
    assert 0 < len([row for row in example_runs.rows(tmp_path / "again" / "metrics.csv") if row["loss"]]) < 3
    assert again["accuracy"] > 0.8
