"""Saving and restoring what a training step changes: Python objects, optimizers, generators, tensors."""

from __future__ import annotations

import random

import pytest
import torch

import xla_amp
from xla_amp.engines import base
from xla_amp.training.step_state import restored


def training(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def step(model, optimizer, schedule):
    device = next(model.parameters()).device
    model(torch.randn(4, 3, device=device)).square().sum().backward()
    optimizer.step()
    schedule.step()
    model.eval().seen = random.random()


def values(model, optimizer, schedule):
    found = {name: value.tolist() for name, value in model.state_dict().items()}
    found |= {str(n): p.grad if p.grad is None else p.grad.tolist() for n, p in enumerate(model.parameters())}
    state = [{k: torch.as_tensor(v).tolist() for k, v in each.items()} for each in optimizer.state.values()]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return found, state, groups, schedule.state_dict(), model.training, hasattr(model, "seen"), torch.rand(1).tolist()


@pytest.mark.parametrize("before", [0, 1])
def test_a_step_and_its_values_are_restored(device, before):
    objects = training(device)
    for _ in range(before):
        step(*objects)
    kept = [objects[1].state, objects[1].param_groups, *objects[1].param_groups]
    torch.manual_seed(1)
    random.seed(1)
    expected = values(*objects), random.random(), torch.rand(1, device=device).tolist()
    torch.manual_seed(1)
    random.seed(1)
    with restored(objects):
        step(*objects)
        objects[1].param_groups[0]["new"] = 1
    assert (values(*objects), random.random(), torch.rand(1, device=device).tolist()) == expected
    assert all(map(lambda a, b: a is b, kept, [objects[1].state, objects[1].param_groups, *objects[1].param_groups]))


def test_a_state_that_was_loaded_in_between_is_replaced_again(device):
    model, optimizer, schedule = training(device)
    step(model, optimizer, schedule)
    state = optimizer.state
    with restored([optimizer]):
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state is not state
    assert optimizer.state is state
    assert len(state) == 4


# ---- writes of a block that are undone on the device where a flag is set ---------------------------------------------

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
    x, other, flag = exact.to("jax"), torch.ones(2, 3, device="jax"), torch.tensor(skipped, device="jax")
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
    whole, flag = torch.arange(6.0).to("jax"), torch.tensor(skipped, device="jax")
    old = whole[2:5]
    with engine.guard() as guard:
        new = old * 10
        storage = old.untyped_storage()
        whole.zero_()
        guard.undo(flag, [(new, old, storage)])
    assert new.tolist() == ([2, 3, 4] if skipped else [20, 30, 40])
    assert whole.tolist() == ([0, 1, 2, 3, 4, 5] if skipped else [0] * 6)
