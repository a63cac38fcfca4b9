"""Weights that lie in memory as the operations that read them want."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import xla_amp
import xla_amp.jax
from xla_amp.lazy.programs import execute, memory_layout
from xla_amp.lazy.tensors import tensor_io

TPUS = (2, 3, 1, 0)


@pytest.fixture
def as_on_tpu(monkeypatch):
    """Orders that are wanted on a TPU, here."""
    real = memory_layout.orders
    monkeypatch.setattr(memory_layout, "orders", lambda operations, platform: real(operations, "tpu"))
    execute.clear_programs()
    yield
    execute.clear_programs()


def order(tensor):
    xla_amp.sync()
    return tensor_io.buffer_of(tensor).array.format.layout.major_to_minor


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2), nn.Flatten(1)
    )


class Trainer:
    def __init__(self, device):
        self.device = device
        self.model = network().to(device)
        kind = torch.optim.SGD if device.type == "cpu" else xla_amp.syncfree.SGD
        self.optimizer = kind(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x.to(self.device)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.fixture
def pair(as_on_tpu):
    return Trainer(torch.device("cpu")), Trainer(xla_amp.xla_device())


def images(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 9, 9, generator=generator) for _ in range(count)]


def close(here, there):
    torch.testing.assert_close(there.cpu(), here, rtol=2e-5, atol=2e-6)


def test_steps_are_torchs_and_one_executable(pair):
    here, there = pair
    for number, x in enumerate(images(6)):
        close(here.step(x), there.step(x))
        if number == 1:
            before = xla_amp.metrics()["compilations"]
    assert xla_amp.metrics()["compilations"] == before
    for mine, theirs in zip(here.model.parameters(), there.model.parameters(), strict=True):
        close(mine, theirs)
    for convolution in (there.model[0], there.model[3]):
        assert order(convolution.weight) == TPUS
        assert order(there.optimizer.state[convolution.weight]["momentum_buffer"]) == TPUS
    assert order(there.model[1].weight) == (0,)
    at = tensor_io.buffer_of(there.model[0].weight).array.unsafe_buffer_pointer()
    there.step(images(1)[0])
    xla_amp.sync(wait=True)
    assert tensor_io.buffer_of(there.model[0].weight).array.unsafe_buffer_pointer() == at  # it writes where it read


def test_without_the_wish_nothing_is_moved():
    execute.clear_programs()
    there = Trainer(xla_amp.xla_device())
    there.step(images(1)[0])
    assert order(there.model[0].weight) == (0, 1, 2, 3)


def test_what_comes_in_another_order_is_put_right(pair):
    here, there = pair
    for x in images(2):
        close(here.step(x), there.step(x))
    saved = {name: value.cpu() for name, value in there.model.state_dict().items()}
    for trainer in pair:  # uploads replace arrays, arithmetic without a convolution gives XLA's own order
        trainer.model.load_state_dict(saved)
        with torch.no_grad():
            trainer.model[3].weight.mul_(1.5)
    xla_amp.sync()
    for x in images(3):
        close(here.step(x), there.step(x))
    close(here.model[3].weight, there.model[3].weight)


def test_evaluation_reads_the_weights_as_they_lie(pair):
    here, there = pair
    (x,) = images(1)
    close(here.step(x), there.step(x))
    twin = copy.deepcopy(there.model).eval()
    with torch.no_grad():
        close(here.model.eval()(x), there.model.eval()(x.to(there.device)))
        close(here.model(x), twin(x.to(there.device)))
        held = tensor_io.buffer_of(twin[0].weight).array
        twin(x.to(there.device))
        xla_amp.sync()
    assert tensor_io.buffer_of(twin[0].weight).array is held  # put right once, not in each call


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_rank(as_on_tpu, rank):
    torch.manual_seed(0)
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    module, x = make(4, 6, 2, groups=2).requires_grad_(False), torch.randn(2, 4, *(5,) * rank)
    expected = module(x).detach()
    there = module.to(xla_amp.xla_device())
    close(expected, there(x.to("jax")))
    assert order(there.weight) == (*range(2, rank + 2), 1, 0)
