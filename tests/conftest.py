"""Settings of every test: the CPU unless the caller chose otherwise, and none of the user's own xla_amp settings."""

from __future__ import annotations

import os

import pytest

# Before anything imports JAX: a test must mean the same on a machine with an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

FOREIGN = ("XLA_AMP_", "XLA_USE_", "PT_HPU_AUTOCAST_", "PJRT_DEVICE")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        monkeypatch.delenv(name)
