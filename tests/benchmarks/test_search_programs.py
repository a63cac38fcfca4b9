"""Cheap rows of benchmarks/search_programs.py: within the budget on unseen batches, near the best random plan."""

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


# front, name, random plans; with five or six candidates these see most of the plans
ROWS = [
    ("torch", "nearly equal", 12),
    ("jax", "nearly equal", 8),
    ("stablehlo", "nearly equal", 4),
    *(
        pytest.param(*row, marks=pytest.mark.full)
        for row in (
            ("torch", "batch norm", 24),
            ("torch", "RoPE", 24),
            ("torch", "log-sum-exp", 12),
            ("torch", "LSTM", 6),
            ("torch", "overflow", 24),
            ("jax", "overflow", 8),
            ("jax", "log-sum-exp", 8),
            ("stablehlo", "overflow", 4),
        )
    ),
]


@pytest.mark.parametrize(("front", "name", "plans"), ROWS)
def test_a_searched_program(programs, front: str, name: str, plans: int):
    row = programs.measure(front, name, "h100", plans)
    assert row["met"]
    assert row["all_low"] > 1, "with everything low it is not within the budget: something must be found"
    for key, limit in row["budget"].items():
        assert 0 < row["errors"][key] <= limit
        assert 0 < row["unseen"][key] <= limit
    assert row["same"], "what is saved gives the same casts when it is read"
    assert row["to_best"] <= 1.05
    assert row["all_low_time"] < row["time"] < 1
