"""Tests of the torch_xla engine: they run where torch_xla is installed, which scripts/torch_xla_env.sh takes care of.

The folder is not called `torch_xla`: pytest puts `tests` on the path, where it would look like the library.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

HAS_TORCH_XLA = find_spec("torch_xla") is not None

# The files import torch_xla at the top: without it they are not collected; the summary reports it (tests/conftest.py).
collect_ignore_glob = [] if HAS_TORCH_XLA else ["test_*.py"]

if HAS_TORCH_XLA:  # on a machine with an accelerator a test must mean the same
    os.environ.setdefault("PJRT_DEVICE", "CPU")


@pytest.fixture(scope="session", autouse=True)
def _device_is_started() -> None:
    if HAS_TORCH_XLA:
        import xla_amp

        xla_amp.xla_device()
