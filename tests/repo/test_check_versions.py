"""`scripts/check_versions.py`: rows that pyproject allows, what it reads from pytest, and its table."""

from __future__ import annotations

import json
import sys
import tomllib

import check_versions
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def test_the_rows_are_within_the_bounds_of_pyproject():
    project = tomllib.loads((check_versions.ROOT / "pyproject.toml").read_text())["project"]
    bounds = {Requirement(line).name: Requirement(line).specifier for line in project["dependencies"]}
    bounds |= {"torch": Requirement(project["optional-dependencies"]["torch"][0]).specifier}
    for row in check_versions.MATRIX:
        assert row.torch in bounds["torch"]
        assert row.jax in bounds["jax"]
        assert row.python in SpecifierSet(project["requires-python"])
        assert f"Programming Language :: Python :: {row.python}" in project["classifiers"]
    assert {row.python for row in check_versions.MATRIX} == {"3.11", "3.12", "3.13"}


@pytest.mark.parametrize(
    ("last", "want"),
    [
        ("12 passed, 4 deselected in 3.20s", {"passed": 12}),
        ("= 1 failed, 12 passed, 2 errors in 62.00s (0:01:02) =", {"failed": 1, "passed": 12, "error": 2}),
        ("Killed", {}),
    ],
)
def test_what_pytest_counted(last, want):
    assert check_versions.counts(f"...\n{last}\n") == want


@pytest.mark.full
def test_a_row_with_an_environment_that_is_there(tmp_path, monkeypatch):
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n\ndef test_two():\n    assert False\n")
    monkeypatch.setattr(check_versions, "FOLDER", tmp_path)
    monkeypatch.setattr(check_versions, "RESULTS", tmp_path / "versions.json")
    options = ["--rows", "pinned", "--env", sys.prefix, "--tests", str(tmp_path / "test_one.py")]
    monkeypatch.setattr(sys, "argv", ["check_versions", *options])
    assert check_versions.main() == 1
    (row,) = json.loads((tmp_path / "versions.json").read_text()).values()
    assert row["counts"] == {"failed": 1, "passed": 1}
    table = (tmp_path / "versions.md").read_text()
    assert "| pinned | 3." in table
    assert "test_two`" in table
    assert "| newest | 3.13 | 2.15 | 0.12 | not run |" in table
