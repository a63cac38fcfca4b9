"""The Python programs of CONTRIBUTING.md run as printed; the files and functions that the pages name exist."""

from __future__ import annotations

import re

import forked
import pytest
from source_tree import ROOT, python_blocks

PROGRAMS = python_blocks("CONTRIBUTING.md")
NAMED = re.compile(r"`((?:xla_amp|lowering|tests|scripts|docs|examples|benchmarks)/[\w/.]*)(?::(\w+))?`")


@pytest.mark.parametrize("program", PROGRAMS, ids=["lowering", "rule", "primitive"])
def test_a_worked_example_runs(program):
    run = forked.run(program=program, warnings="error")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_file_and_function_that_is_named_exists(page):
    named = NAMED.findall((ROOT / page).read_text())
    assert len(named) > 5
    assert [path for path, _ in named if not (ROOT / path).exists()] == []
    missing = [
        f"{path}:{name}"
        for path, name in named
        if name and not re.search(rf"^\s*(def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert missing == []
