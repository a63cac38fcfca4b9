"""Fifty random schedules of overflowing and finite steps, against torch's own formula and skips decided on the host."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree

STEPS = 40
SCHEDULES = 50
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, capturable=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.5, capturable=True),
    "syncfree.AdamW": lambda p: syncfree.AdamW(p, lr=0.05),
    "syncfree.SGD": lambda p: syncfree.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}
"""As they step in the loop, and below as torch steps them."""


def schedule(seed):
    """Options of a scaler, and which steps overflow."""
    draw = random.Random(seed)
    options = {
        "init_scale": 2.0 ** draw.choice([-20, 0, 16, 126, 127]),
        "growth_factor": draw.choice([2.0, 1.5, 3.0]),
        "backoff_factor": draw.choice([0.5, 0.25, 0.9]),
        "growth_interval": draw.choice([1, 2, 3, 7]),
    }
    share = draw.choice([0.05, 0.3, 0.6])
    return options, [draw.random() < share for _ in range(STEPS)]


def torchs_scales(options, bad):
    """Scale and growth tracker after each step, by torch's kernel on the CPU."""
    scale = torch.full((), options["init_scale"])
    tracker = torch.zeros((), dtype=torch.int32)
    result = []
    for overflow in bad:
        found = torch.tensor(float(overflow))
        torch._amp_update_scale_(
            scale, tracker, found, options["growth_factor"], options["backoff_factor"], options["growth_interval"]
        )
        result.append((scale.item(), tracker.item()))
    return result


def values(optimizer, params):
    states = [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    return [tensor.detach().cpu().clone() for tensor in (*params, *states)]


@pytest.fixture(scope="module")
def gradients():
    generator = torch.Generator().manual_seed(0)
    device = xla_amp.xla_device()
    drawn = [[torch.randn(shape, generator=generator) for shape in ((3, 2), (4,))] for _ in range(STEPS)]
    return [[gradient.to(device) for gradient in step] for step in drawn]


def parameters():
    generator = torch.Generator().manual_seed(1)
    device = xla_amp.xla_device()
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in ((3, 2), (4,))]


def run(make, options, steps):
    """The loop, over (overflows, gradients); returns the optimizer, parameters, scaler, and scales with trackers."""
    device = xla_amp.xla_device()
    params = parameters()
    optimizer = make(params)
    scaler = GradScaler(device, **options)
    scaler.scale(torch.ones((), device=device))
    history = []
    for overflow, step in steps:
        for parameter, gradient in zip(params, step, strict=True):
            parameter.grad = torch.full_like(gradient, float("inf")) if overflow else gradient * 1.0
        # Unscaled by 1, so that gradients have the same bits whatever the scale is.
        scale, scaler._scale = scaler._scale, torch.ones_like(scaler._scale)
        scaler.unscale_(optimizer)
        scaler._scale = scale
        scaler.step(optimizer)
        scaler.update()
        history.append(torch.stack([scaler._scale.double(), scaler._growth_tracker.double()]))
        xla_amp.sync()
    return optimizer, params, scaler, [tuple(row) for row in torch.stack(history).tolist()] if history else []


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_a_schedule(seed, gradients):
    options, bad = schedule(seed)
    make = OPTIMIZERS[list(OPTIMIZERS)[seed % len(OPTIMIZERS)]]
    optimizer, params, scaler, history = run(make, options, zip(bad, gradients, strict=True))
    assert history == torchs_scales(options, bad)
    assert int(scaler.skipped_steps()) == sum(bad)

    # The host leaves the overflowing steps out.
    finite = [(False, step) for overflow, step in zip(bad, gradients, strict=True) if not overflow]
    reference, expected, _, _ = run(make, {"init_scale": 1.0}, finite)
    for one, other in zip(values(optimizer, params), values(reference, expected), strict=True):
        assert torch.equal(one, other)

    # torch alone, on the CPU; another program rounds otherwise.
    plain = [parameter.detach().cpu().double().requires_grad_() for parameter in parameters()]
    theirs = PLAIN[list(OPTIMIZERS)[seed % len(OPTIMIZERS)]](plain)
    for _, step in finite:
        for parameter, gradient in zip(plain, step, strict=True):
            parameter.grad = gradient.cpu().double()
        theirs.step()
    for one, other in zip(params, plain, strict=True):
        torch.testing.assert_close(one.detach().cpu().double(), other.detach(), rtol=1e-5, atol=1e-5)


PLAIN = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.5),
    "syncfree.AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "syncfree.SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


def test_the_schedules_differ():
    drawn = [schedule(seed) for seed in range(SCHEDULES)]
    assert len({str(options) for options, _ in drawn}) > 30
    assert {sum(bad) > 20 for _, bad in drawn} == {True, False}
