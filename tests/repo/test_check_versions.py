"""`scripts/check_versions.py`: rows that pyproject allows, what it reads from pytest, and its table."""

from __future__ import annotations

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


def test_the_table_has_each_row_and_what_failed():
    versions = {"python": "3.12", "torch": "2.13", "jax": "0.10"}
    found = {"versions": versions, "counts": {"failed": 1, "passed": 2}, "tests": "one", "failed": ["a.py::test_two"]}
    table = check_versions.table({"pinned": {**found, "date": "2026-01-01", "commit": "c0ffee"}})
    assert "| pinned | 3.12 | 2.13 | 0.10 | one | 2 | 1 | 0 | 0 |" in table
    assert "- pinned: `a.py::test_two`" in table
    assert "| newest | 3.13 | 2.15 | 0.12 | not run |" in table
