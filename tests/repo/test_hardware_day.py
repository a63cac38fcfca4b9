"""`scripts/gpu_day.sh`, `hardware_day.py tpu`: parts exist, a failing one stops no other, a second run continues."""

from __future__ import annotations

import json
import sys

import hardware_day
import pytest


def test_every_file_of_a_part_is_there():
    for part in hardware_day.PARTS:
        for command in (part.command, part.dry):
            for word in command:
                if word.startswith(("tests/", "benchmarks/", "examples/")):
                    assert (hardware_day.ROOT / word).exists(), (part.name, word)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Two parts, of which the first fails until the file "mended" is there."""
    fails = f"import pathlib, sys; print('x|y'); sys.exit(not pathlib.Path({str(tmp_path / 'mended')!r}).exists())"
    counts = f"open({str(tmp_path / 'runs')!r}, 'a').write('.')"
    made = [
        hardware_day.Part(name=n, shows=n, command=("-c", c), dry=("-c", c)) for n, c in (("a", fails), ("b", counts))
    ]
    monkeypatch.setattr(hardware_day, "PARTS", made)
    monkeypatch.setattr(hardware_day, "BUILD", tmp_path)
    monkeypatch.setattr(hardware_day, "RESULTS", tmp_path)
    monkeypatch.setattr(hardware_day, "commit", lambda: "c0ffee")
    monkeypatch.setattr(hardware_day, "machine", lambda: {"chip": "NVIDIA H100", "platform": "gpu"})
    monkeypatch.setattr(sys, "argv", ["hardware_day", "gpu"])
    return tmp_path


def test_parts_that_failed_run_again(parts, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert hardware_day.main() == 1
    assert "| a | a | 1 |" in (parts / "gpu_day.md").read_text()
    assert "`x\\|y`" in (parts / "gpu_day.md").read_text()
    assert "| b | b | ok |" in (parts / "gpu_day.md").read_text()
    (parts / "mended").touch()
    assert hardware_day.main() == 0
    assert {
        name: row["status"] for name, row in json.loads((parts / "gpu_day" / "results.json").read_text()).items()
    } == {
        "a": 0,
        "b": 0,
    }
    assert (parts / "runs").read_text() == "."  # the second one had succeeded at this commit


def test_without_a_gpu_it_says_what_to_type(parts, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(hardware_day, "machine", lambda: {"chip": "cpu", "platform": "cpu"})
    with pytest.raises(SystemExit, match="a GPU is needed, or --dry-run"):
        hardware_day.main()


def test_a_tpu_has_parts_of_its_own(parts, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(hardware_day, "machine", lambda: {"chip": "TPU v6e", "platform": "tpu"})
    more = hardware_day.Part(name="c", shows="c", command=("-c", "print(7)"), dry=("-c", "1"), platforms=("tpu",))
    monkeypatch.setattr(hardware_day, "PARTS", [*hardware_day.PARTS, more])
    monkeypatch.setattr(sys, "argv", ["hardware_day", "tpu", "--parts", "c"])
    assert hardware_day.main() == 0
    assert "| c | c | ok |" in (parts / "tpu_day.md").read_text()
    monkeypatch.setattr(sys, "argv", ["hardware_day", "gpu", "--parts", "c"])
    with pytest.raises(SystemExit):
        hardware_day.main()
    assert "--parts c: expected some of a, b" in capsys.readouterr().err


@pytest.mark.parametrize("platform", hardware_day.PLATFORMS)
def test_a_name_is_one_part_of_a_platform(platform):
    names = [part.name for part in hardware_day.PARTS if platform in part.platforms]
    assert len(names) == len(set(names)) >= 11
