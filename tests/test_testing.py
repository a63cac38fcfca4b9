"""`xla_amp.testing`: counts of a block."""

from __future__ import annotations

import pytest
import torch

import xla_amp
from xla_amp.testing import counts


def test_a_block_is_counted_and_nothing_after_it():
    x = torch.ones(3, 5).to(xla_amp.xla_device())
    xla_amp.sync()
    with counts() as seen:
        y = (x + 1).sum()
        xla_amp.sync()
        assert seen.executions == 1  # so far
        assert y.item() == 30
    (x * 2).sum().item()
    assert (seen.executions, seen.host_syncs, seen.device_to_host, seen.fallbacks) == (1, 1, 1, 0)
    assert "executions=1" in repr(seen)
    with pytest.raises(AttributeError, match=r"counts\(\) has no 'executables'; it counts executions, compilations"):
        seen.executables  # noqa: B018


def test_a_block_that_raises_is_counted():
    x, inside = torch.ones(7).to(xla_amp.xla_device()), counts()
    seen = inside.__enter__()
    assert x.cos().sum().item() > 0
    assert not inside.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # the exception goes on
    x.sin().sum().item()
    assert (seen.executions, seen.host_syncs) == (1, 1)
