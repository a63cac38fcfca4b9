"""Keeping old values: a step that must not happen leaves no trace, without a read of the condition."""

from __future__ import annotations

import pytest
import torch

from xla_amp import lazy as engine
from xla_amp.testing import counts as counted


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("cut_between", [False, True])
def test_values_are_kept_where_the_condition_holds(device: torch.device, skip: float, cut_between: bool) -> None:
    x, y = torch.ones(3).to(device), torch.arange(4).to(device)
    whole, part = torch.zeros(2, 3).to(device), None
    part = whole[1]
    condition = torch.tensor(skip).to(device)
    engine.sync()
    with counted() as counts:
        before = engine.snapshot([x, y, part])
        x.add_(1)
        y.mul_(10)
        part.fill_(5)
        if cut_between:
            engine.sync()
        engine.select(condition, [x, y, part], before)
        engine.sync()
    assert counts.executions == 1 + cut_between
    assert (counts.host_syncs, counts.device_to_host) == (0, 0)
    if skip:
        assert (x.tolist(), y.tolist(), whole.tolist()) == ([1] * 3, [0, 1, 2, 3], [[0] * 3, [0] * 3])
    else:
        assert (x.tolist(), y.tolist(), whole.tolist()) == ([2] * 3, [0, 10, 20, 30], [[0] * 3, [5] * 3])


def test_a_snapshot_holds_no_memory_of_its_own(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    with counted() as counts:
        before = engine.snapshot([x])
        engine.sync()
    assert counts.operations == 0
    x.add_(1)
    engine.sync()
    engine.select(torch.ones((), device=device), [x], before)  # also after flushes
    assert x.tolist() == [1, 1, 1]


def test_nothing_to_restore(device: torch.device) -> None:
    engine.select(torch.ones((), device=device), [], engine.snapshot([]))


def test_the_condition_never_builds_anew(device: torch.device) -> None:
    x = torch.ones(21).to(device)
    built = []
    for skip in (0.0, 1.0, 0.0, 1.0):
        condition = torch.tensor(skip).to(device)
        engine.sync()
        with counted() as counts:
            before = engine.snapshot([x])
            x.add_(1)
            engine.select(condition, [x], before)
            del before
            engine.sync()
        built.append(counts.compilations)
    assert built[1:] == [0, 0, 0]
    assert x[0].item() == 3
