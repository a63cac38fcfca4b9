"""The lazy device for every test of this folder, with nothing left in the trace from the test before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from xla_amp import lazy as engine
from xla_amp.errors import XlaAmpError


@pytest.fixture(scope="session")
def _device() -> torch.device:
    return engine.device()


@pytest.fixture
def device(_device: torch.device) -> Iterator[torch.device]:
    """``torch.device("jax:0")``, its trace empty before and after."""
    _empty()
    yield _device
    _empty()


def _empty() -> None:
    try:
        engine.sync()
    except XlaAmpError:
        engine.sync()  # a failed step is gone from the trace, so nothing of it reaches the next test
