"""The cheap rows of benchmarks/search_programs.py: within the budget on unseen batches, near the best random plan."""

from __future__ import annotations

import sys

import pytest
from source_tree import ROOT


@pytest.fixture(scope="module")
def programs():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import search_programs

        yield search_programs
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


# name, random plans; with five or six candidates these see most of the plans
ROWS = [
    ("nearly equal", 12),
    *(
        pytest.param(name, plans, marks=pytest.mark.exhaustive)
        for name, plans in (("batch norm", 24), ("RoPE", 24), ("log-sum-exp", 12), ("LSTM", 6), ("overflow", 24))
    ),
]


@pytest.mark.parametrize(("name", "plans"), ROWS)
def test_a_searched_program(programs, name: str, plans: int):
    row = programs.measure(name, "h100", plans)
    assert row["met"]
    assert row["all_low"] > 1, "with everything low it is not within the budget: something must be found"
    for key, limit in row["budget"].items():
        assert 0 < row["errors"][key] <= limit
        assert 0 < row["unseen"][key] <= limit
    assert row["to_best"] <= 1.05
    assert row["all_low_time"] < row["time"] < 1
