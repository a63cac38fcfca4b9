"""A model that trains on the CPU although the device was started: one warning a process, few false alarms."""

from __future__ import annotations

import weakref

import pytest
import torch

from xla_amp.common import config
from xla_amp.lazy.steps import step_marker


@pytest.fixture(autouse=True)
def fresh(device, monkeypatch):
    """As in a process whose device was started and not used."""
    monkeypatch.setattr(step_marker, "_watching", True)
    monkeypatch.setattr(step_marker, "_steps", weakref.WeakKeyDictionary())


def train(where, width=400, steps=12):
    model = torch.nn.Linear(width, width).to(where)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(1, width, device=where)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_large_model_is_told_once():
    with pytest.warns(
        UserWarning, match=r"SGD has made 10 steps on 160400 .* model.to\(xla_amp.xla_device\(\)\)"
    ) as told:
        train("cpu")
    assert "XLA_AMP_CPU_TRAINING=allow" in str(told[0].message)
    train("cpu")  # warnings are errors here


def test_small_models_and_short_comparisons_are_not():
    train("cpu", width=8)
    train("cpu", steps=9)


def test_nor_is_a_program_that_trains_on_the_device(device):
    train(device, width=2, steps=1)
    train("cpu")


def test_nor_one_that_allows_it(monkeypatch):
    monkeypatch.setenv(config.CPU_TRAINING, "allow")
    train("cpu")
