"""The LightningModule's example in a new process: it learns, shows, logs, and goes on from its checkpoint."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import forked
import pytest
from source_tree import ROOT

pytest.importorskip("lightning", reason="the extra `lightning`")


def run(*flags: str) -> tuple[dict[str, Any], str]:
    """The results, and all that was printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = ROOT / "examples" / "lightning_module.py"
    done = forked.run(script, "--batch-size=128", "--json", *flags, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.full
def test_it_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    flags = ["--precision=fp16", f"--output={tmp_path / 'run'}", "--log-steps=11"]
    found, shown = run(*flags, "--epochs=3", f"--log-dir={tmp_path / 'logs'}")
    assert found["device"] == "jax:0"
    assert found["accuracy"] > 0.8
    assert "loss_scale=65536.0, accuracy=" in shown
    logged = rows(tmp_path / "logs")
    assert {"loss", "lr", "loss_scale", "accuracy"} <= set(logged[0])
    assert [int(row["step"]) for row in logged if row["loss"]] == [10, 21, 32]
    assert list((tmp_path / "logs").glob("events*"))

    early = min((tmp_path / "run").glob("epoch=*.ckpt"))
    early.replace(tmp_path / "run" / "last.ckpt")
    again, _ = run(*flags, "--epochs=3", f"--log-dir={tmp_path / 'again'}")
    assert again["resumed_from"] == "last.ckpt"
    assert again["steps"] == found["steps"] == 33
    assert 0 < len([row for row in rows(tmp_path / "again") if row["loss"]]) < 3
    assert again["accuracy"] > 0.8
