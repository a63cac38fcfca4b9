"""The lazy device for every test of this folder, with nothing left on the tape from the test before."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest
import torch

from xla_amp.engines import jax as engine
from xla_amp.errors import XlaAmpError

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(scope="session")
def _device() -> torch.device:
    return engine.device()


@pytest.fixture
def device(_device: torch.device) -> Iterator[torch.device]:
    """``torch.device("jax:0")``, its tape empty before and after."""
    _empty()
    yield _device
    _empty()


def _empty() -> None:
    try:
        engine.sync()
    except XlaAmpError:
        engine.sync()  # a failed step is gone from the tape, so nothing of it reaches the next test
