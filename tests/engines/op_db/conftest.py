"""The lazy device for the operator database."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

from xla_amp.engines import jax as engine

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(scope="session")
def lazy() -> torch.device:
    """``torch.device("jax:0")``."""
    return engine.device()
