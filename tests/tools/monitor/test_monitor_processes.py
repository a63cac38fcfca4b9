"""The monitor in two processes: gradients are those of both, layers and the kept step are each process's own."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import forked
import pytest
from monitor_program import BAD, BAD_RANK

pytestmark = [pytest.mark.full, pytest.mark.processes]  # four processes
PROGRAM = Path(__file__).with_name("monitor_program.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_AMP_TIMEOUT": "120"}
    done = forked.run(PROGRAM, folder, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"monitor: step {BAD} is bad") == 2
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("0", "1", "alone")}


def test_both_skip_the_step_that_one_has_made_bad(seen):
    for rank in "01":
        assert seen[rank]["skipped"] == [index == BAD for index in range(6)]
        assert (seen[rank]["kept"], seen[rank]["nonfinite"]) == (f"run/step-{BAD}", 4)
    assert seen["0"]["norms"][:BAD] == seen["1"]["norms"][:BAD], "of reduced gradients"


def test_the_layers_of_the_process_that_overflowed_tell_which_it_is(seen):
    finite = [all(map(math.isfinite, seen[rank]["largest"].values())) for rank in "01"]
    assert finite == [rank != BAD_RANK for rank in range(2)]


def test_one_process_finds_the_operation_in_the_file_of_each(seen):
    assert seen["alone"] == {"0": None, "1": "0"}
