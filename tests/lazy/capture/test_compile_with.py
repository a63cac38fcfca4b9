"""Captured steps together with the rest: accumulation, a mesh, padding to a few sizes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import forked
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp.lazy.programs import execute
from xla_amp.pytorch.data.buckets import pad_to_bucket

PROGRAM = Path(__file__).with_name("compile_spmd_program.py")
PARTS, STEPS = 3, 6


@pytest.fixture(scope="module")
def device():
    return xla_amp.xla_device()


def test_on_a_mesh():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_AMP_PLATFORM": "cpu"}
    done = forked.run(PROGRAM, environment=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["replayed"]["replays"] == 6
    assert found["replayed"]["bits"] == found["recorded"]["bits"]
    assert found["replayed"]["scale"] == found["recorded"]["scale"] == 512.0


def accumulate(device, wrap):
    """Losses and weights of training in `PARTS` parts, and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Dropout(0.1), nn.Linear(40, 4)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)

    def step(*batch):
        losses = []
        for x, y in zip(*(tensor.chunk(PARTS) for tensor in batch), strict=True):
            with xla_amp.autocast(device):
                loss = F.cross_entropy(model(x), y) / PARTS
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses)

    step, losses = wrap(step), []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(2 * PARTS, 24, generator=generator).to(device)
        losses.append(step(x, torch.randint(4, (2 * PARTS,), generator=generator).to(device)).cpu())
    return losses, [p.detach().cpu() for p in model.parameters()], step


def test_accumulation_inside_the_step(device):
    losses, weights, _ = accumulate(device, lambda step: step)
    execute.clear_programs()
    replayed, after, step = accumulate(device, lambda step: xla_amp.compile(step, strict=True))
    text = max(execute.programs(), key=lambda program: program.operations).optimized_hlo()
    # The weight itself is cast once for all parts; gradients of its shape are cast too.
    assert len(re.findall(r"= bf16\[40,24\]\S* (?:fusion|convert)\(%taken_", text)) == 1
    assert step.replays > 0
    for one, other in zip(losses + weights, replayed + after, strict=True):
        assert torch.equal(one, other)


def test_padding_keeps_the_number_of_captures_small(device):
    torch.manual_seed(0)
    model = nn.Embedding(16, 5).to(device)

    @xla_amp.compile(strict=True, limit=2)
    def loss_of(tokens, labels):
        with torch.no_grad():
            return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)

    for length in (3, 4, 2, 4, 7, 8, 5, 6, 3):
        tokens, labels = torch.randint(16, (2, length)), torch.randint(5, (2, length))
        padded = [pad_to_bucket(t, (4, 8), value=v).to(device) for t, v in ((tokens, 0), (labels, -100))]
        exact = F.cross_entropy(model.weight.detach().cpu()[tokens].flatten(0, 1), labels.flatten())
        torch.testing.assert_close(loss_of(*padded).cpu(), exact)
    assert loss_of.replays == 5
    assert loss_of.reasons == []
