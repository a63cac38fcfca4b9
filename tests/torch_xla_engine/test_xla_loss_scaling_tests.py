"""The tests of gradient scaling and of sync-free optimizers that the lazy device passes, on torch_xla's device.

In processes of their own, because torch_xla's donation of buffers is off in them: torch_xla 2.9 gives the memory of a
tensor away that another was filled from (`load_state_dict` between models on the device, `copy_`), and these tests
begin with two equal models.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from xla_amp.common import config

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "test_torch_scaling.py": {"test_unscale_sparse": "torch_xla's device has no sparse tensors"},
        "test_grad_scaler.py": {
            "test_devices": "names the lazy device",
            "test_counting_skips_costs_two_recorded_operations": "counts what the lazy device records",
            "test_torchs_scaler_does_not_wait_either": "torch_xla's device does (test_what_the_stock_scaler_costs)",
        },
        "test_syncfree.py": {},
    }
)
"""File of tests/pytorch/optim -> what of it is left out, and why."""
AT_LEAST = {"test_torch_scaling.py": 18, "test_grad_scaler.py": 50, "test_syncfree.py": 48}
"""How many tests each has on the device: fewer mean that they were not found."""


@pytest.mark.parametrize("file", list(LEFT_OUT))
def test_on_torch_xla(file):
    path = ROOT / "tests" / "pytorch" / "optim" / file
    environment = config.child_environment(
        {"XLA_AMP_ENGINE": "torch_xla", "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", "XLA_ENABLE_PARAM_ALIASING": "0"}
    )
    out = [f"--deselect={path.relative_to(ROOT)}::{name}" for name in LEFT_OUT[file]]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-k", "not cpu", *out, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=290, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout.splitlines()[-1])
    assert passed is not None
    assert int(passed[1]) >= AT_LEAST[file], done.stdout
