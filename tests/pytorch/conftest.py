"""The XLA device is started before any test: PyTorch sizes its backward threads at the first backward pass."""

from __future__ import annotations

import pytest

import xla_amp


@pytest.fixture(scope="session", autouse=True)
def _device_is_started():
    xla_amp.xla_device()
