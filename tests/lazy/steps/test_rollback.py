"""Writes of a block, to whatever tensor, are undone on the device where a flag is set."""

from __future__ import annotations

import pytest
import torch

import xla_amp
from xla_amp.engines import base

DEVICE = "jax"
WRITES = {
    "in place": lambda x: x.mul_(2),
    "as a whole": lambda x: x.zero_(),
    "from another tensor": lambda x: x.copy_(x.sum()),
    "through a view": lambda x: x[1:].fill_(9),
    "of a transposed view": lambda x: x.t().add_(torch.arange(6.0, device=x.device).reshape(3, 2)),
    "from the host": lambda x: x.copy_(torch.full((2, 3), 7.0)),
    "in a list": lambda x: torch._foreach_mul_([x], 3.0),
    "an out argument": lambda x: torch.add(x, 1, out=x),
    "behind a read": lambda x: x.mul_(2) if x.add_(1).sum().item() > 0 else None,
    "behind two reads": lambda x: [x.mul_(2).sum().item() for _ in range(2)],
    "none": lambda x: x + 1,
}


@pytest.mark.parametrize("settled", [False, True], ids=["recorded", "settled"])
@pytest.mark.parametrize("skipped", [0.0, 1.0])
@pytest.mark.parametrize("write", WRITES)
def test_writes_are_undone(write, skipped, settled):
    engine = base.select()
    engine.device()
    exact = torch.arange(6.0).reshape(2, 3)
    x, other, flag = exact.to(DEVICE), torch.ones(2, 3, device=DEVICE), torch.tensor(skipped, device=DEVICE)
    x = x + 0 if not settled else x
    expected = exact.clone()
    if not skipped:
        WRITES[write](expected)
    with engine.guard() as guard:
        WRITES[write](x)
        made = x + 1
        assert guard.made(made)
        assert not guard.made(other)
        guard.undo(flag)
    assert torch.equal(x.cpu(), expected)
    assert torch.equal(other.cpu(), torch.ones(2, 3))
    assert xla_amp.metrics()["fallbacks"] == 0


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_a_tensor_made_instead_of_another_gets_its_old_value(skipped):
    engine = base.select()
    engine.device()
    whole, flag = torch.arange(6.0).to(DEVICE), torch.tensor(skipped, device=DEVICE)
    old = whole[2:5]
    with engine.guard() as guard:
        new = old * 10
        storage = old.untyped_storage()
        whole.zero_()
        guard.undo(flag, [(new, old, storage)])
    assert new.tolist() == ([2, 3, 4] if skipped else [20, 30, 40])
    assert whole.tolist() == ([0, 1, 2, 3, 4, 5] if skipped else [0] * 6)
