"""Captured steps that run their executable without JAX's look at each array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental.layout import Format, Layout
from lazy_device import COMPILED, jax_events
from torch import nn

import xla_amp
import xla_amp.jax
from xla_amp import syncfree
from xla_amp.errors import StepFailedError
from xla_amp.lazy import private_api
from xla_amp.lazy.capture.fast_dispatch import Direct


@pytest.fixture
def device():
    return xla_amp.xla_device()


@pytest.fixture
def directly(monkeypatch):
    """What ran directly so far."""
    seen = []
    real = Direct.__call__
    monkeypatch.setattr(Direct, "__call__", lambda self, *arguments: seen.append(self) or real(self, *arguments))
    return seen


class Trainer:
    def __init__(self, device):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2)).to(device)
        self.model[0].weight.requires_grad_(False)  # kept, not handed over
        self.optimizer = syncfree.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def step(self, x):
        with xla_amp.autocast(x.device):
            loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self, batches, compiled=True, double_at=None):
        torch.manual_seed(1)
        step, losses = xla_amp.compile(self.step, strict=True) if compiled else self.step, []
        for number, batch in enumerate(batches):
            if number == double_at:
                with torch.no_grad():
                    self.model[3].weight.mul_(2)
            losses.append(step(*batch))
            self.schedule.step()
        return [loss.item() for loss in losses], [value.tolist() for value in self.model.state_dict().values()]


def batches(device, count=8):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=generator).to(device),) for _ in range(count)]


def recorded(device, **options):
    return Trainer(device).train(batches(device), compiled=False, **options)


def test_from_the_second_replay_on_and_nothing_is_compiled_for_it(device, directly):
    trainer = Trainer(device)
    step = xla_amp.compile(trainer.step, strict=True)
    given = batches(device)
    with jax_events() as events:
        step(*given[0])
        assert COMPILED in events  # the twin: what compiles is heard
        for batch in given[1:3]:
            step(*batch)
        assert (step.replays, len(directly)) == (1, 0)
        events.clear()
        for batch in given[3:]:
            step(*batch)
    assert (step.replays, len(directly), events.count(COMPILED)) == (6, 5, 0)


def test_values_are_those_of_recording(device, directly):
    assert Trainer(device).train(batches(device)) == recorded(device)
    assert len(directly) == 5


def test_state_that_changes_in_between(device, directly):
    assert Trainer(device).train(batches(device), double_at=6) == recorded(device, double_at=6)
    assert len(directly) == 4  # of the replays 2 to 6: not the one that finds its state outside


def turned(tensor):
    """`tensor` as JAX has it, in another order in memory."""
    place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    array = jax.device_put(jnp.asarray(tensor.cpu().numpy()), Format(Layout((1, 0)), place))
    assert array.format.layout.major_to_minor == (1, 0)
    return array


def test_an_argument_that_lies_in_another_order(device, directly):
    given = batches(device)
    given[6] = (xla_amp.jax.from_jax(turned(given[6][0])),)
    assert Trainer(device).train(given) == recorded(device)
    assert len(directly) == 4


@pytest.mark.parametrize("layer", [0, 3])
def test_weights_that_are_jaxs_too(layer, device, directly):
    trainer = Trainer(device)
    before = trainer.model[layer].weight
    array = turned(before.detach())
    values = array.tolist()
    trainer.model[layer].weight = nn.Parameter(xla_amp.jax.from_jax(array), before.requires_grad)
    trainer.optimizer.param_groups[0]["params"] = [p for p in trainer.model.parameters() if p.requires_grad]
    assert trainer.train(batches(device)) == recorded(device)
    assert array.tolist() == values
    assert len(directly) == {0: 5, 3: 4}[layer]  # one that is trained is overwritten from the second call on


def test_inputs_that_the_program_does_not_read(device, directly):
    total = torch.zeros(3, device=device)

    def add(x, unread):
        unread * 2
        return total.add_(x)

    step = xla_amp.compile(add, strict=True)
    x = torch.ones(3, device=device)
    for _ in range(5):
        step(x, x.clone())
    assert total.tolist() == [5.0] * 3
    assert directly
    assert directly[0]._pick is not None


def summing(device, calls):
    """A captured sum of ones after so many calls, the function and its argument."""
    total = torch.zeros(3, device=device)
    step = xla_amp.compile(lambda x: total.add_(x), strict=True)
    x = torch.ones(3, device=device)
    for _ in range(calls):
        step(x)
    return total, step, x


def test_checks_for_nan_are_left_to_jax(device, directly):
    total, step, x = summing(device, 6)
    before = len(directly)
    assert before
    with jax.debug_nans(True):
        step(x)
    assert len(directly) == before
    step(x)
    assert len(directly) == before + 1
    assert total.tolist() == [8.0] * 3


def test_where_jax_hides_its_executable(device, directly, monkeypatch):
    monkeypatch.setattr(private_api, "loaded", lambda compiled: None)
    assert Trainer(device).train(batches(device)) == recorded(device)
    assert not directly


def test_a_failure_is_said_and_what_was_handed_over_is_lost(device, monkeypatch):
    total, step, x = summing(device, 5)

    def fail(self, donated, *_):
        for array in donated:
            array.delete()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Direct, "__call__", fail)
    with pytest.raises(StepFailedError, match="out of memory"):
        step(x)
    with pytest.raises(StepFailedError, match="memory was handed to a step that then failed"):
        total.tolist()
    assert x.tolist() == [1.0] * 3
