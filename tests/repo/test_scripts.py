"""Scripts that test other versions and other machines, and what a default run leaves out."""

from __future__ import annotations

import math
import os
import re
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
    workflow = (ROOT / ".github/workflows/full.yml").read_text()
    elsewhere = [(row.name, row.python) for row in check_versions.MATRIX if row.name != "pinned"]
    assert re.findall(r'row: (\S+), python: "(\S+)"', workflow) == elsewhere


@pytest.mark.parametrize("platform", hardware_day.PLATFORMS)
@pytest.mark.parametrize("dry", [False, True])
def test_parts_of_a_hardware_day_name_files_that_exist(platform, dry):
    words = {word for part in hardware_day.plan(platform, dry) for word in part.command}
    paths = [word for word in words if word.startswith(("tests/", "benchmarks/", "examples/"))]
    assert paths
    assert [path for path in paths if not (ROOT / path.partition("::")[0]).exists()] == []


def day(folder, parts, seconds=600.0, reports=None):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"}
    found = hardware_day.Day(parts, folder, environment, seconds, (reports or []).append)
    found.run(side_by_side=2)
    return found.results


def test_a_hardware_day_goes_on_where_it_stopped(tmp_path):
    """A part that stopped by an error runs again, one that ended does not; the table has a row of each."""
    fails = f"import pathlib, sys; print('x|y'); sys.exit(not pathlib.Path({str(tmp_path / 'mended')!r}).exists())"
    counts = f"open({str(tmp_path / 'runs')!r}, 'a').write('.')"
    parts = [
        hardware_day.Part(name=n, shows=n, command=("-c", c), quiet=n == "b") for n, c in (("a", fails), ("b", counts))
    ]
    for status in ("stopped by an error", "ok"):
        results = day(tmp_path, parts)
        assert [results[name]["status"] for name in "ab"] == [status, "ok"]
        shown = hardware_day.report(parts, "NVIDIA H100", results, [])
        assert re.search(rf"\| a \| a \| {status} \| \d \| x\\\|y \|", shown)
        (tmp_path / "mended").touch()
    assert (tmp_path / "runs").read_text() == "."


def test_what_is_timed_first_runs_before_the_tests(tmp_path):
    plan = [part.name for part in hardware_day.plan("gpu")]
    assert plan[:3] == ["products", "head", "fronts"]
    assert sum(part.seconds for part in hardware_day.plan("gpu")[:2]) <= 180
    rows = [("a", True), ("b", False), ("c", True)]
    log = tmp_path / "log"
    parts = [
        hardware_day.Part(name=name, shows="", command=("-c", f"print('{name}', file=open('{log}', 'a'))"), quiet=quiet)
        for name, quiet in rows
    ]
    day(tmp_path, parts)
    assert log.read_text().split() == ["a", "b", "c"]


def test_a_hardware_day_says_first_what_is_missing(monkeypatch):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert [package for package in hardware_day.NEEDS.values() if package not in page] == []
    monkeypatch.setattr(hardware_day, "NEEDS", {"pytest": "pytest", "no_such_module": "no-such-package"})
    monkeypatch.setattr(hardware_day.shutil, "which", lambda name: None)
    assert hardware_day.missing("gpu", dry=True) == [
        "Python package no-such-package",
        "a C compiler (cc or gcc), for torch.compile",
    ]


@pytest.mark.full
@pytest.mark.timeout(1300)
def test_the_plan_of_a_gpu_day_runs_on_a_cpu(tmp_path):
    command = [ROOT / "scripts" / "gpu_day.sh", "--dry-run", "--again", "--minutes", "20"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "XLA_FLAGS")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1300,
        cwd=tmp_path,
        env={**environment, "PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| ([\w-]+) \|.*\| ok \| \d+ \|", done.stdout, re.MULTILINE)
    assert rows == [part.name for part in hardware_day.plan("gpu")]
    steps = re.findall(r"^\| (GPT-2|ResNet-50|BERT|ViT): .*\|  \|$", done.stdout, re.MULTILINE)  # none has failed
    assert [steps.count(name) for name in hardware_day.RACES] == [
        4,
        2,
        1,
        1,
    ]  # each peer once, and two ways of products


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


def test_each_mutation_changes_its_file():
    for row in tomllib.loads((ROOT / "scripts/code_mutations.toml").read_text())["mutation"]:
        assert (ROOT / row["file"]).read_text().count(row["old"]) == 1, row["name"]
        assert row["new"] != row["old"], row["name"]
        assert any((ROOT / tests).exists() for tests in row["tests"]), row["name"]
