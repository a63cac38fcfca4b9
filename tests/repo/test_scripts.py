"""Scripts that test other versions and other machines, and what a default run leaves out."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tomllib

import check_versions
import hardware_day
import pytest
from packaging.requirements import Requirement
from source_tree import ROOT


def test_versions_are_within_the_bounds_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {Requirement(line).name: Requirement(line).specifier for line in project["dependencies"]}
    torch = Requirement(project["optional-dependencies"]["torch"][0]).specifier
    for row in check_versions.MATRIX:
        assert row.torch in torch
        assert row.jax in bounds["jax"]
        assert f"Programming Language :: Python :: {row.python}" in project["classifiers"]
    assert {row.python for row in check_versions.MATRIX} == {"3.11", "3.12", "3.13"}


def test_parts_of_a_hardware_day_name_files_that_exist():
    words = {word for part in hardware_day.PARTS for command in (part.command, part.dry) for word in command}
    paths = [word for word in words if word.startswith(("tests/", "benchmarks/", "examples/"))]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_parts_of_a_hardware_day_that_failed_run_again(tmp_path):
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


def collected(*options: str) -> list[list[str]]:
    """The parts of the names of a test's rows."""
    test = "tests/lowering/linalg/test_contraction.py::test_folded_transposes"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *options, test]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=ROOT, env=environment)
    return [line.partition("[")[2].rstrip("]").split("-") for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.full
def test_the_default_run_has_each_row_of_a_matrix_once():
    default, everything = collected(), collected("-m", "full or not full")
    sides = [set(side) for side in zip(*everything, strict=True)]
    assert len(everything) == math.prod(map(len, sides))
    assert [set(side) for side in zip(*default, strict=True)] == sides
    assert len(default) == max(map(len, sides))
