"""`scripts/gpu_day.sh`: its parts exist, a failing part does not stop the next, and a second run continues."""

from __future__ import annotations

import json
import sys

import gpu_day
import pytest


def test_every_file_of_a_part_is_there():
    for part in gpu_day.PARTS:
        for command in (part.command, part.dry):
            for word in command:
                if word.startswith(("tests/", "benchmarks/", "examples/")):
                    assert (gpu_day.ROOT / word).exists(), (part.name, word)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Two parts, of which the first fails until the file "mended" is there."""
    fails = f"import pathlib, sys; print('x|y'); sys.exit(not pathlib.Path({str(tmp_path / 'mended')!r}).exists())"
    counts = f"open({str(tmp_path / 'runs')!r}, 'a').write('.')"
    made = [gpu_day.Part(name=n, shows=n, command=("-c", c), dry=("-c", c)) for n, c in (("a", fails), ("b", counts))]
    monkeypatch.setattr(gpu_day, "PARTS", made)
    monkeypatch.setattr(gpu_day, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_day, "commit", lambda: "c0ffee")
    monkeypatch.setattr(gpu_day, "machine", lambda: {"chip": "NVIDIA H100", "platform": "gpu"})
    monkeypatch.setattr(gpu_day, "TABLE", tmp_path / "table.md")
    monkeypatch.setattr(sys, "argv", ["gpu_day"])
    return tmp_path


def test_parts_that_failed_run_again(parts, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpu_day.main() == 1
    assert "| a | a | 1 |" in (parts / "table.md").read_text()
    assert "`x\\|y`" in (parts / "table.md").read_text()
    assert "| b | b | ok |" in (parts / "table.md").read_text()
    (parts / "mended").touch()
    assert gpu_day.main() == 0
    assert {name: row["status"] for name, row in json.loads((parts / "results.json").read_text()).items()} == {
        "a": 0,
        "b": 0,
    }
    assert (parts / "runs").read_text() == "."  # the second one had succeeded at this commit


def test_without_a_gpu_it_says_what_to_type(parts, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(gpu_day, "machine", lambda: {"chip": "cpu", "platform": "cpu"})
    with pytest.raises(SystemExit, match="a GPU is needed, or --dry-run"):
        gpu_day.main()
