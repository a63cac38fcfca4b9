"""What the examples share: the log, and lines of a log above a progress bar."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from source_tree import ROOT


def test_a_log_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import common

    for step in (1, 2):
        log = common.Log(str(tmp_path))
        log.add(step, {"loss": torch.tensor(0.5 * step)})
        log.close()
    with open(tmp_path / "log.csv") as file:
        assert list(csv.reader(file)) == [["step", "loss"], ["1", "0.5"], ["2", "1.0"]]
    with pytest.raises(ValueError, match="accuracy"):
        common.Log(str(tmp_path)).add(3, {"accuracy": 1.0})
    common.Log(None).add(1, {"loss": 1.0})  # writes nothing
