"""The lazy device for the operator database."""

from __future__ import annotations

import pytest
import torch

from xla_amp import lazy as engine


@pytest.fixture(scope="session")
def lazy() -> torch.device:
    """``torch.device("jax:0")``."""
    return engine.device()
