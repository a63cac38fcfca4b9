"""Compiling ahead of the first step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp.errors import CaptureError, FileError, PolicyError
from xla_amp.lazy.programs.compilation_cache import compilation_cache

CALLS = 6


@pytest.fixture(scope="module")
def device():
    return xla_amp.xla_device()


def training(device, make_optimizer=xla_amp.syncfree.AdamW, width=16):
    """(step, everything that it changes, as tensors) of a small fp16 model with running statistics and dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 4)).to(device)
    optimizer = make_optimizer(model.parameters(), lr=1e-2)
    scaler = xla_amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)

    def step(x, y):
        optimizer.zero_grad()
        with xla_amp.autocast(device, dtype=torch.float16, policy="gpu"):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    def state():
        moments = [t for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        return [t.cpu() for t in (*model.state_dict().values(), *moments)] + [torch.tensor(scaler.get_scale())]

    return xla_amp.compile(step, strict=True), state, optimizer


def batch(device, number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 8, generator=generator).to(device), torch.randint(4, (6,), generator=generator).to(device)


def outcome(device, warm):
    step, state, optimizer = training(device)
    compiled = step.warm_up(*batch(device, 99)) if warm else None
    before = xla_amp.metrics()["compilations"]
    fresh = dict(optimizer.state)
    losses = [step(*batch(device, number)).cpu() for number in range(CALLS)]
    return losses + state(), compiled, xla_amp.metrics()["compilations"] - before, fresh, step.replays


def test_warming_up_compiles_everything_and_changes_nothing(device):
    xla_amp.sync()  # what other tests recorded and did not ask for
    xla_amp.lazy.programs.execute.clear_programs()
    warm, compiled, later, fresh, replays = outcome(device, warm=True)
    assert (compiled, later, fresh) == (1, 0, {})  # the first step runs the same program
    cold, _, _, _, cold_replays = outcome(device, warm=False)
    assert replays == cold_replays > 0
    assert len(warm) == len(cold)
    for one, other in zip(warm, cold, strict=True):
        assert torch.equal(one, other)


def test_warming_up_in_the_middle_of_training_changes_nothing(device):
    step, state, _ = training(device)
    for number in range(3):
        step(*batch(device, number))
    before, random = state(), torch.jax.get_rng_state()
    x = torch.randn(10, 8).to(device)
    assert step.warm_up(x, torch.zeros(10, dtype=torch.int64, device=device)) > 0
    assert torch.equal(torch.jax.get_rng_state(), random)
    for one, other in zip(before, state(), strict=True):
        assert torch.equal(one, other)


def test_warming_up_says_what_cannot_be_replayed(device):
    @xla_amp.compile
    def step(x):
        return x * x.sum().item()

    with pytest.raises(CaptureError, match="reads a value on the host"):
        step.warm_up(torch.ones(3, device=device))


@pytest.mark.parametrize(
    ("path", "options", "kind", "words"),
    [
        ("file/below", {}, FileError, "cannot be made"),
        ("folder", {"least_seconds": -1}, PolicyError, "not negative"),
        ("folder", {"most_bytes": -1}, PolicyError, "not negative"),
    ],
)
def test_bad_folders(tmp_path, path, options, kind, words):
    (tmp_path / "file").touch()
    with pytest.raises(kind, match=words):
        compilation_cache(tmp_path / path, **options)
