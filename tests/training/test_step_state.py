"""Saving and restoring what a training step changes: Python objects, optimizers, generators, tensors."""

from __future__ import annotations

import random

import pytest
import torch

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
