"""What the examples share: the log, and lines of a log above a progress bar."""

from __future__ import annotations

import csv
import subprocess
import sys
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


PROGRAM = """
import logging, sys, warnings
sys.path.insert(0, sys.argv.pop())
import common
from tqdm import tqdm

def main(argv):
    with tqdm(total=2, file=sys.stderr) as bar:
        bar.update()
        logging.warning("a line")
        warnings.warn("another line")

common.run(main)
"""


def test_lines_of_a_log_do_not_cut_through_a_bar() -> None:
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "examples")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.rpartition("\r")[2] for line in done.stderr.split("\n")]
    for text in ("a line", "another line"):
        (found,) = [line for line in lines if line.endswith(text)]
        assert found.startswith("W"), found  # the mark of a line of the log: the bar was cleared before it
