"""Compiling ahead of the first step, and not again in the next process; what is shown meanwhile."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp.errors import CaptureError, FileError, PolicyError
from xla_amp.lazy.programs import progress
from xla_amp.lazy.programs.compilation_cache import compilation_cache

PROGRAM = Path(__file__).with_name("compile_program.py")
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


def start(folder, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_AMP_PLATFORM": "cpu", **environment}
    done = forked.run(PROGRAM, folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_next_process_compiles_nothing(tmp_path):
    first = start(str(tmp_path / "programs"))
    second = start("", XLA_AMP_CACHE=str(tmp_path / "programs"))
    assert first["misses"] > 0
    assert second["misses"] == 0
    assert second["hits"] >= 2
    assert second["losses"] == first["losses"]
    assert second["replays"] == first["replays"] == 2


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


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "asked", "seconds", "shown"),
    [
        (Terminal, "", 0.5, True),
        (Terminal, "", 0.0, False),
        (Terminal, "off", 0.5, False),
        (io.StringIO, "", 0.5, False),
        (io.StringIO, "on", 0.5, True),
    ],
)
def test_long_compilations_show_a_line(stream, asked, seconds, shown, monkeypatch):
    terminal = stream()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "QUIET", 0.05 if seconds else 60.0)
    monkeypatch.setenv("XLA_AMP_PROGRESS", asked)
    with progress.compiling(12, "cpu"):
        deadline = time.monotonic() + seconds
        while shown and not terminal.getvalue() and time.monotonic() < deadline + 20:
            time.sleep(0.02)
    assert ("compiling a step of 12 operations for cpu" in terminal.getvalue()) == shown
