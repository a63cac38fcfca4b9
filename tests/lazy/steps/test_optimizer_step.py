"""Steps of torch.optim on the device: what hooks, errors and subclasses see, and where a class was used before."""

from __future__ import annotations

import forked
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import xla_amp
from xla_amp.testing import counts as counted


def options(optimizer):
    group = optimizer.param_groups[0]
    return {name: group.get(name) for name in ("fused", "foreach", "capturable", "lr")}


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "Adagrad", "Muon"])
def test_options_are_those_of_the_user_for_hooks_and_after_an_error(name):
    """The closure, hooks of the optimizer and of all, and what is read after a step that raised see them."""
    weight = nn.Parameter(torch.ones(3, 2, device=xla_amp.xla_device()))
    optimizer = getattr(torch.optim, name)([weight], lr=0.25)
    before, seen = options(optimizer), []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append(options(optimizer))),
        optimizer.register_step_post_hook(lambda *_: seen.append(options(optimizer))),
        register_optimizer_step_post_hook(lambda *_: seen.append(options(optimizer))),
    ]

    def closure():
        seen.append(options(optimizer))
        weight.grad = torch.ones_like(weight)
        return weight.grad.sum()

    def failing():
        raise ValueError("of the closure")

    assert optimizer.step(closure).item() == 6
    with pytest.raises(ValueError, match="of the closure"):
        optimizer.step(failing)
    weight.grad = None
    nn.functional.embedding(torch.tensor([1], device=weight.device), weight, sparse=True).sum().backward()
    if name not in ("SGD", "Adagrad"):
        with pytest.raises(RuntimeError, match="sparse gradients"):
            optimizer.step()
    for handle in handles:
        handle.remove()
    assert [*seen, options(optimizer)] == [before] * (len(seen) + 1)
    assert len(seen) >= 5


@pytest.mark.parametrize("name", ["AdamW", "RAdam", "SGD", "Adafactor"])
@pytest.mark.parametrize("number", [float, np.float64, torch.tensor], ids=["float", "numpy", "tensor"])
def test_rates_on_the_host_do_not_shape_programs(name, number):
    """Nor are they read from the device; the weights are those of torch."""

    def train(device):
        weight = nn.Parameter(torch.linspace(0.5, 2, 6).reshape(3, 2).to(device))
        optimizer = getattr(torch.optim, name)([weight], lr=number(0.1), foreach=False, weight_decay=0.1)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = number(0.1 / (1 + step))
            weight.grad = (weight.detach() - 0.3) * 2
            optimizer.step()
            if device != "cpu":
                xla_amp.sync()
        return weight.detach().cpu()

    with counted() as counts:
        found = train(xla_amp.xla_device())
    assert counts.host_syncs == 1  # for the result
    assert counts.compilations <= 3
    torch.testing.assert_close(found, train("cpu"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("make", [torch.optim.SGD, xla_amp.syncfree.SGD])
def test_momentum_of_a_parameter_whose_gradients_begin_later(make, dampening):
    def train(device, make):
        first, second = (nn.Parameter(torch.ones(2, device=device)) for _ in range(2))
        optimizer = make([first, second], lr=0.1, momentum=0.9, dampening=dampening)
        for step in range(5):
            first.grad = torch.full_like(first, 1.0 + step)
            second.grad = torch.full_like(second, 2.0 + step) if step > 1 else None
            optimizer.step()
        return [first.tolist(), second.tolist()]

    expected = train("cpu", torch.optim.SGD)
    assert torch.tensor(train(xla_amp.xla_device(), make)).allclose(torch.tensor(expected), rtol=1e-6)


EARLIER = """
import torch, xla_amp
class Named(torch.optim.AdamW): pass
class Calling(torch.optim.RMSprop):
    def step(self, closure=None): return super().step(closure)
kinds = torch.optim.AdamW, torch.optim.NAdam, Named, Calling
for kind in kinds:
    kind([torch.nn.Parameter(torch.ones(2))]).step()
device = xla_amp.xla_device()
for kind in kinds:
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer, hooked = kind([weight], lr=0.1), []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    def step():
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    step = xla_amp.compile(step, strict=True)
    for _ in range(6):
        step()
    assert step.replays == 3, (kind, step.reasons)
    assert len(hooked) == 3
"""


def test_classes_that_made_an_optimizer_before_the_device_started():
    forked.run(program=EARLIER, warnings="error")
