"""A bad step that refers to a checkpoint: `monitor.saved`, and a replay from there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp.tools.monitor import bad_step
from xla_amp.tools.monitor.on_pytorch.replay import replay

BAD = 5


class Half(nn.Module):
    def forward(self, x):
        return x.half().float()


def make(checkpoint=None):
    """On the CPU; the batch of the bad step overflows float16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Half(), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if checkpoint is not None:
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, None, step


def train(directory, saved_before, save_state=False):
    """Saves checkpoints before the steps `saved_before`, and tells the monitor."""
    model, optimizer, _, step = make()
    monitor = xla_amp.monitor(model, optimizer, directory=directory, sample=1, save_state=save_state, low="float16")
    made = torch.Generator().manual_seed(1)
    for index in range(9):
        if index in saved_before:
            path = directory / f"step_{index}.pt"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            monitor.saved(path)
        x = torch.randn(3, 4, generator=made)
        x[1] *= 1e7 if index == BAD else 1.0
        with monitor.step(x) as running:
            running.loss = step(x)
    monitor.close()
    return bad_step.read(monitor.bad_step)


def test_a_step_right_after_a_checkpoint_runs_again_to_the_bit(tmp_path):
    bad = train(tmp_path, [2, BAD, 8])
    assert (bad.step, bad.state, bad.checkpoint_step) == (BAD, "checkpoint", BAD)
    assert bad.checkpoint == str(tmp_path / f"step_{BAD}.pt")
    assert not (bad_step.folder(tmp_path, BAD, 0) / "state.pt").exists()
    found = replay(tmp_path, make)
    assert found.differences == ()
    assert found.compared > 40
    assert found.elements == (1,)
    assert bad.checkpoint in found.notes[0]


def test_a_bad_step_refers_to_the_last_checkpoint_before_it(tmp_path):
    bad = train(tmp_path, [2, 8])
    assert (bad.state, bad.checkpoint_step) == ("checkpoint", 2), "not to the one that was saved after it"
    found = replay(tmp_path, make)
    assert not found.reproduced
    assert "it ran in the state of step 2" in found.notes[0]
    assert found.elements == (1,)


def test_without_a_checkpoint_the_replay_says_so(tmp_path):
    bad = train(tmp_path, [8])
    assert (bad.state, bad.checkpoint) == ("none", None)
    assert "it ran in the state that make() gives" in replay(tmp_path, make).notes[0]


@pytest.mark.parametrize("saved_before", [[], [2]])
def test_a_kept_state_is_taken_before_a_checkpoint(tmp_path, saved_before):
    bad = train(tmp_path, saved_before, save_state=True)
    assert bad.state == "kept"
    found = replay(tmp_path, make)
    assert found.differences == ()
    assert found.notes == ()
