"""What a script makes on the device before its loop is no part of the first step: all steps are one program."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xla_amp
from xla_amp.lazy.programs import execute
from xla_amp.testing import counts as counted


def nothing(model: nn.Module) -> dict[str, Any]:
    """What a script makes before its loop: `weights` of the classes, and how it does an `update` after each step."""
    return {}


def a_computed_constant(model: nn.Module) -> dict[str, Any]:
    return {"weights": torch.linspace(1, 2, 3, device="jax").softmax(0)}


def a_sum_of_losses(model: nn.Module) -> dict[str, Any]:
    total = torch.zeros((), device="jax")
    return {"update": total.add_}


def an_average_of_the_weights(model: nn.Module) -> dict[str, Any]:
    average = copy.deepcopy(model)

    def update(loss: torch.Tensor) -> None:
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)

    return {"update": update}


def batches() -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(16, 4), torch.randint(3, (16,))), batch_size=4)


def steps(model: nn.Module, update: Any = lambda loss: None, weights: torch.Tensor | None = None) -> Iterator[None]:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches():
        with xla_amp.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x.to(device)), y.to(device), weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update(loss.detach())
        yield
    xla_amp.sync()  # while the gradients live


@pytest.mark.parametrize("setup", [nothing, a_computed_constant, a_sum_of_losses, an_average_of_the_weights])
def test_the_first_step_is_the_same_program_as_the_others(device: torch.device, setup: Any) -> None:
    model = nn.Linear(4, 3).to(device)
    xla_amp.sync()
    running = steps(model, **setup(model))
    next(running)  # the loop has begun
    execute.clear_programs()
    with counted() as counts:
        list(running)
    assert (counts.compilations, counts.executions) == (1, 4)


def test_a_batch_of_another_loader_ends_no_step(device: torch.device) -> None:
    """As semi-supervised training reads one between two forward passes."""
    model = nn.Linear(4, 3).to(device)
    execute.clear_programs()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), batches()
    with counted() as counts:
        for x, y in batches():
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss = loss + model(next(iter(other))[0].to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        xla_amp.sync()
    assert (counts.compilations, counts.executions) == (1, 4)


def test_what_is_recorded_between_two_epochs_is_no_part_of_a_step(device: torch.device, tmp_path: Path) -> None:
    """Sums, weights that are swapped for their average and back, a checkpoint; a loop over a list has no beginning."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    data, steps_of_epochs = list(batches()), []
    execute.clear_programs()
    for epoch in range(4):
        total = torch.zeros((), device=device)
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.1) if value.is_floating_point() else average[name].copy_(value)
        total.item()
        live = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(average)
        with torch.no_grad():
            model.eval()(data[0][0].to(device)).argmax(1).eq(data[0][1].to(device)).sum().item()
        model.load_state_dict(live)
        model.train()
        if epoch % 2:
            torch.save(model.state_dict(), tmp_path / "model.pt")
        steps_of_epochs.append(sum(program.operations > 20 for program in execute.programs()))
    assert len(set(steps_of_epochs)) == 1  # only what is between two epochs is compiled later: zeros, copies


@pytest.mark.parametrize(("loader", "programs"), [(False, 1), (True, 3)])
def test_programs_of_an_accumulation(device: torch.device, loader: bool, programs: int) -> None:
    """A batch of a `DeviceLoader` ends the program: the first part, those in between, and the last part differ."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.01), list(batches())
    execute.clear_programs()
    with counted() as counts:
        for _ in range(3):
            for number, (x, y) in enumerate(xla_amp.DeviceLoader(data, device) if loader else data):
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
        xla_amp.sync()
    assert counts.compilations == programs
