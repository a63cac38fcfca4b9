"""A short form of tests/helpers/soak_training.py, whose long form takes 20,000 steps."""

from __future__ import annotations

import json

import forked
import pytest
from source_tree import ROOT

from xla_amp.common import config


@pytest.mark.full
def test_disturbed_training_equals_undisturbed_training_bit_for_bit() -> None:
    script, environment = ROOT / "tests" / "helpers" / "soak_training.py", config.child_environment({})
    run = forked.run(script, "--steps", "130", environment=environment, warnings="ignore")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["different"] == []
    for event in ("exceptions", "evaluations", "checkpoints"):
        assert found[event] > 0
