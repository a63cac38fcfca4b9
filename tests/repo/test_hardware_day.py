"""`scripts/gpu_day.sh`, `hardware_day.py tpu`: parts exist, a failing one stops no other, a second run continues."""

from __future__ import annotations

import os

import hardware_day
import pytest


def test_every_file_of_a_part_is_there():
    for part in hardware_day.PARTS:
        for command in (part.command, part.dry):
            for word in command:
                if word.startswith(("tests/", "benchmarks/", "examples/")):
                    assert (hardware_day.ROOT / word).exists(), (part.name, word)


def test_parts_that_failed_run_again(tmp_path):
    """Two parts, of which the first fails until the file "mended" is there."""
    fails = f"import pathlib, sys; print('x|y'); sys.exit(not pathlib.Path({str(tmp_path / 'mended')!r}).exists())"
    counts = f"open({str(tmp_path / 'runs')!r}, 'a').write('.')"
    parts = [
        hardware_day.Part(name=n, shows=n, command=("-c", c), dry=("-c", c)) for n, c in (("a", fails), ("b", counts))
    ]
    for status in (1, 0):
        *_, kept = hardware_day.run_each(parts, tmp_path, "c0ffee", dict(os.environ), dry=False, again=False)
        assert [kept[name]["status"] for name in "ab"] == [status, 0]
        shown = hardware_day.table(parts, {"chip": "NVIDIA H100"}, kept)
        assert f"| a | a | {status or 'ok'} |" in shown
        assert "`x\\|y`" in shown
        (tmp_path / "mended").touch()
    assert (tmp_path / "runs").read_text() == "."  # it had succeeded at this commit


@pytest.mark.parametrize("platform", hardware_day.PLATFORMS)
def test_a_name_is_one_part_of_a_platform(platform):
    names = [part.name for part in hardware_day.PARTS if platform in part.platforms]
    assert len(names) == len(set(names)) >= 11
