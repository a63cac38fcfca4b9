"""A flag without a scaler: processes that train together skip the same steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import pytest

PROGRAM = Path(__file__).with_name("flag_program.py")


@pytest.mark.full
def test_a_flag_of_one_process_skips_the_step_in_all(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_AMP_TIMEOUT": "60"}
    done = forked.run(PROGRAM, tmp_path, environment=environment, copies=True)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert len(first) == 6
    for values in first.values():
        begin, skipped, stepped, skipped_again = values
        assert begin == skipped != 1.0
        assert stepped == skipped_again != skipped
