"""The monitor in two processes: histories apart, the rank that overflowed is named, and both replay to the bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import pytest
from monitor_program import BAD, BAD_RANK, ELEMENT

pytestmark = pytest.mark.full  # four processes
PROGRAM = Path(__file__).with_name("monitor_program.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_AMP_TIMEOUT": "120"}
    done = forked.run(PROGRAM, folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("0", "1", "alone")}


def test_each_process_has_its_own_history(seen):
    for rank in "01":
        assert seen[rank]["steps"] == list(range(6))
        assert seen[rank]["step"] == BAD
    assert seen["0"]["norms"][:BAD] == seen["1"]["norms"][:BAD], "of reduced gradients"


def test_the_rank_that_overflowed_is_named(seen):
    assert [seen[rank]["local"] for rank in "01"] == [rank == BAD_RANK for rank in range(2)]
    assert (seen["alone"]["rank"], seen["alone"]["elements"]) == (BAD_RANK, [ELEMENT])


def test_a_replay_in_two_processes_is_the_same_to_the_bit(seen):
    for rank in "01":
        assert seen[rank]["differences"] == []
        assert seen[rank]["compared"] > 60


def test_a_replay_in_one_process_leaves_out_what_both_have_reduced(seen):
    assert seen["alone"]["differences"] == []
    left_out = seen["0"]["compared"] - seen["alone"]["compared"]
    assert seen["alone"]["notes"] == [
        f"{left_out} numbers of gradients and updates come from all 2 processes and were not compared; a replay in 2 "
        "processes does that"
    ]
