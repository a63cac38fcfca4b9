"""Tests of the torch_xla engine: they run where torch_xla is installed, which scripts/torch_xla_env.sh takes care of.

The folder is not called `torch_xla`: pytest puts `tests` on the path, where it would look like the library.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HAS_TORCH_XLA = find_spec("torch_xla") is not None
HERE = Path(__file__).parent

# The files import torch_xla at the top: without it they are not even collected, and the summary says so.
collect_ignore_glob = [] if HAS_TORCH_XLA else ["test_*.py"]

# torch_xla reads it at every question; on a machine with an accelerator a test must mean the same.
PJRT_DEVICE = os.environ.setdefault("PJRT_DEVICE", "CPU") if HAS_TORCH_XLA else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what a run without torch_xla did not do."""
    if not HAS_TORCH_XLA:
        files = sorted(path.name for path in HERE.glob("test_*.py"))
        terminalreporter.write_line(
            f"torch_xla is not installed: {len(files)} files of tests/{HERE.name} are left to "
            f"scripts/torch_xla_env.sh ({', '.join(files)})"
        )


@pytest.fixture(autouse=True)
def _pjrt_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The common fixture takes it away with the user's own settings."""
    if HAS_TORCH_XLA:
        monkeypatch.setenv("PJRT_DEVICE", PJRT_DEVICE)


@pytest.fixture(scope="session", autouse=True)
def _device_is_started() -> None:
    if HAS_TORCH_XLA:
        import xla_amp

        xla_amp.xla_device()
