"""The lazy device does what same_step.json says, against which the torch_xla engine is tested elsewhere."""

from __future__ import annotations

import json
import os

import forked
import pytest
from source_tree import ROOT

FOLDER = ROOT / "tests" / "torch_xla_engine"


@pytest.mark.full
def test_the_stored_step_is_the_lazy_devices():
    stored = json.loads((FOLDER / "same_step.json").read_text())
    environment = os.environ | {"XLA_AMP_ENGINE": "jax", "OMP_NUM_THREADS": "1"}
    done = forked.run(FOLDER / "same_step.py", environment=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("engine") == "jax"
    assert found.keys() == stored.keys()
    for precision, run in found.items():
        tolerance = 1e-5 if precision == "fp32" else 1e-2
        assert run.pop("losses") == pytest.approx(stored[precision].pop("losses"), rel=tolerance)
        assert run == stored[precision]
