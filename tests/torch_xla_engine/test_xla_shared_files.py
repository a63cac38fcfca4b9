"""Files of tests/pytorch on torch_xla's device: what holds there is said once, and the environment chooses the engine.

In processes of their own, because torch_xla's donation of buffers is off in them: torch_xla 2.9 gives the memory of a
tensor away that another was filled from (`load_state_dict` between models on the device, `copy_`), and some of these
tests begin with two equal models.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from source_tree import ROOT

ON_DEVICE = "test_torchs_own_optimizers_step_on_the_device has it"
FILES: Mapping[str, tuple[int, Mapping[str, str]]] = MappingProxyType(
    {
        "autocast/test_autocast_regions.py": (12, {}),
        "autocast/test_rules_in_regions.py": (40, {
            "test_torchs_regions_follow_overrides_and_ours_around_them": "torch.autocast has torch_xla's own kernels",
        }),
        "autocast/test_torch_lists.py": (3, {}),
        "optim/test_grad_scaler.py": (26, {
            "test_devices": "names the lazy device",
            "test_nothing_waits_for_the_device[<class 'torch": "it waits (test_what_the_stock_scaler_costs)",
        }),
        "optim/test_optimizer_options.py": (28, {}),
        "optim/test_scaler_states.py": (4, {
            "test_a_loop_does_what_the_model_does[XLA Adam]": ON_DEVICE,
            "test_a_loop_does_what_the_model_does[XLA fused SGD]": ON_DEVICE,
        }),
        "optim/test_syncfree.py": (13, {}),
        "optim/test_torch_scaling.py": (8, {"test_unscale_sparse": "torch_xla's device has no sparse tensors"}),
    }
)  # fmt: skip
"""File -> how many tests it has on the device at least (fewer were not found), and what is left out, and why."""


@pytest.mark.parametrize("file", list(FILES))
def test_on_torch_xla(file):
    at_least, left_out = FILES[file]
    environment = os.environ | {
        "XLA_AMP_ENGINE": "torch_xla",
        "PJRT_DEVICE": "CPU",
        "OMP_NUM_THREADS": "1",
        "XLA_ENABLE_PARAM_ALIASING": "0",
    }
    path = f"tests/pytorch/{file}"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-k", "not cpu and not native", path]
    command += [f"--deselect={path}::{name}" for name in left_out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=290, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout.splitlines()[-1])
    assert passed is not None
    assert int(passed[1]) >= at_least, done.stdout
