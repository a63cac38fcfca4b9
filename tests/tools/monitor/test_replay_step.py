"""A bad step is kept, named, and run again bit for bit."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp import cli
from xla_amp.errors import FileError
from xla_amp.tools.monitor import bad_step, history
from xla_amp.tools.monitor.history import ValueKey
from xla_amp.tools.monitor.on_pytorch.replay import MakeError, replay

RARE, BAD_STEP, ELEMENT = 12, 7, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(F.relu(self.up(x))))


def make(captured: bool = False):
    """A model in which the embedding of one token overflows float16 in the block."""
    torch.manual_seed(1)
    device = xla_amp.xla_device()
    model = nn.Sequential(nn.Embedding(RARE + 1, 4), Block(), nn.Linear(4, RARE + 1))
    with torch.no_grad():
        model[0].weight[RARE] = 200.0
        model[1].up.weight[3] = 100.0
    model.to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-3)
    scaler = xla_amp.GradScaler(init_scale=64.0)

    def step(x, y):
        optimizer.zero_grad()
        with xla_amp.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return model, optimizer, scaler, xla_amp.compile(step, strict=True) if captured else step


def make_captured():
    return make(captured=True)


def train(directory, captured: bool, steps: int = 12, **options):
    model, optimizer, scaler, step = make(captured)
    device = xla_amp.xla_device()
    monitor = xla_amp.monitor(model, optimizer, scaler, directory=directory, **options)
    made = torch.Generator().manual_seed(4)
    for index in range(steps):
        x, y = (torch.randint(0, RARE, (4, 5), generator=made) for _ in "xy")
        if index == BAD_STEP:
            x[ELEMENT, 1] = RARE
        x, y = x.to(device), y.to(device)
        with monitor.step(x, y) as running:
            running.loss = step(x, y)
    monitor.close()
    return monitor


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=pytest.mark.full), True],
    ids=["recorded", "captured"],
)
def kept(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return request.param, directory, train(directory, request.param, save_state=True, sample=1)


def test_the_bad_step_is_kept_and_named(kept):
    _, directory, monitor = kept
    assert monitor.bad_step == bad_step.folder(directory, BAD_STEP, 0)
    bad = bad_step.read(monitor.bad_step)
    assert (bad.step, bad.reason, bad.state, bad.loss_scale, bad.low) == (BAD_STEP, "loss", "kept", 64.0, "float16")
    records = history.read(monitor.bad_step / bad_step.HISTORY)
    assert [record.step for record in records.steps] == list(range(BAD_STEP + 1))
    assert records.steps[-1].skipped
    named = [key for key, row in records.steps[-1].statistics.items() if not row.finite]
    assert named[0] == ValueKey("1.up", "activation")
    every_step = history.read(directory / "history.jsonl")
    assert [record.step for record in every_step.steps] == list(range(12))
    sentences = [str(each) for each in monitor.advice()]
    assert f"the loss is not finite since step {BAD_STEP}" in sentences
    update = records.steps[-1].statistics[ValueKey("1.up", "update")]
    assert (update.amax, update.nan) == (0, 0)  # skipped


def test_the_bad_step_runs_again_bit_for_bit(kept, monkeypatch, capsys):
    captured, directory, _ = kept
    monkeypatch.setitem(sys.modules, "training_program", sys.modules[__name__])
    name = "make_captured" if captured else "make"
    assert cli.main(["monitor", "replay", str(directory), "--make", f"training_program:{name}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["differences"] == []
    assert report["compared"] > 80
    assert report["elements"] == [ELEMENT]
    assert report["overflow"]["producers"][0]["place"]["module"] == "1.up"
    text = (bad_step.folder(directory, BAD_STEP, 0).parent / "report.txt").read_text()
    assert text.startswith(f"step {BAD_STEP}: its loss was not finite\n")
    assert "Is the step the same, bit for bit?\n  yes, " in text
    assert f"Which batch elements?\n  {ELEMENT} (of 4)" in text
    assert "addmm made inf in the forward pass, module 1.up" in text


def test_a_replay_says_what_is_not_as_it_was(kept):
    _, directory, monitor = kept
    batch, kept_batch = torch.load(monitor.bad_step / "batch.pt", weights_only=True), monitor.bad_step / "batch.pt"
    saved, bad = kept_batch.read_bytes(), bad_step.read(monitor.bad_step)
    records = history.read(monitor.bad_step / bad_step.HISTORY)
    batch["batch"][0][0, 0] = (batch["batch"][0][0, 0] + 1) % RARE
    torch.save(batch, kept_batch)
    bad_step.write(monitor.bad_step, dataclasses.replace(bad, state="none"), records)
    try:
        report = replay(directory, make_captured)
    finally:
        kept_batch.write_bytes(saved)
        bad_step.write(monitor.bad_step, bad, records)
    assert not report.reproduced
    assert "numbers differ" in str(report)
    assert "the state before the step was not kept" in report.notes[0]
    assert report.elements == (ELEMENT,)  # it overflows in this state too


def test_a_search_for_the_scale_is_no_bad_step(tmp_path):
    model = nn.Linear(4, 4).to(xla_amp.xla_device())
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=1e-3)
    scaler = xla_amp.GradScaler(init_scale=2.0**127, growth_interval=3, max_scale=2.0**127)
    monitor = xla_amp.monitor(model, optimizer, scaler, directory=tmp_path, sample=1)
    x = torch.ones(2, 4).to(xla_amp.xla_device())
    for _ in range(9):
        with monitor.step(x) as running:
            optimizer.zero_grad()
            running.loss = (model(x) * 4.0).square().sum()
            scaler.scale(running.loss).backward()
            scaler.step(optimizer)
            scaler.update()
    found = monitor.read().steps
    assert sum(record.skipped for record in found) >= 2  # the search at the beginning, and a probe after growth
    assert found[0].skipped
    assert not found[-1].skipped or found[-2].loss_scale < found[-1].loss_scale
    assert monitor.bad_step is None
    monitor.close()


def test_the_first_bad_loss_without_a_scaler_is_kept(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = xla_amp.monitor(model, optimizer, directory=tmp_path, save_state=True, sample=1)
    for index in range(4):
        x = torch.full((2, 4), math.inf if index >= 2 else 1.0)
        with monitor.step({"x": x}) as running:
            optimizer.zero_grad()
            running.loss = model(x).sum()
            running.loss.backward()
            optimizer.step()
    monitor.close()
    assert bad_step.read(monitor.bad_step).step == 2
    state = torch.load(monitor.bad_step / "state.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    assert torch.load(monitor.bad_step / "batch.pt", weights_only=True)["batch"][0]["x"].isinf().all()


def test_errors_of_a_replay_say_what_to_type(tmp_path, kept, capsys):
    with pytest.raises(FileError, match="no bad step here"):
        replay(tmp_path, make)
    assert cli.main(["monitor", "replay", str(kept[1]), "--make", "no_module_here:make"]) == 2
    assert "no_module_here" in capsys.readouterr().err
    with pytest.raises(MakeError, match="expected module:function"):
        replay(kept[1], "make")
    with pytest.raises(MakeError, match=r"must return \(model, optimizer, scaler, step\), got Linear"):
        replay(kept[1], lambda: nn.Linear(1, 1))


def make_scaled(scale: float = 4.0, weight: float = 1.0):
    """For an input of 100 its gradient overflows float16 at a scale of 1,024, and its loss with a weight of 1,000."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(x):
        optimizer.zero_grad()
        loss = (x.half() @ model.weight.half().T).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, optimizer, scaler, step


def record_scaled(directory, weight: float, scale: float) -> None:
    model, optimizer, scaler, step = make_scaled(scale, weight)
    monitor = xla_amp.monitor(model, optimizer, scaler, directory=directory, sample=1)
    for size in (1.0, 1.0, 1.0, 100.0):
        x = torch.full((1, 4), size)
        with monitor.step(x) as running:
            running.loss = step(x)
    monitor.close()


def test_a_step_without_its_state_runs_at_the_recorded_loss_scale(tmp_path):
    record_scaled(tmp_path, 1.0, 1024.0)
    report = replay(tmp_path, make_scaled)
    assert report.bad.loss_scale == 1024.0
    assert report.overflow.scale == 1024.0
    assert report.overflow.first.place.phase == "backward"
    assert "in the state that make() gives, at the recorded loss scale" in report.notes[0]
    with pytest.raises(MakeError, match="ran at a loss scale of 1024; make\\(\\) must return the scaler"):
        replay(tmp_path, lambda: (*make_scaled()[:2], None, make_scaled()[3]))


def test_a_finite_replay_without_the_state_is_no_answer(tmp_path):
    record_scaled(tmp_path, 1000.0, 4.0)
    report = replay(tmp_path, make_scaled)
    assert (report.overflow.first, report.of_step) == (None, False)
    said = " ".join(str(report).split())
    assert "cannot be replayed without its state" in said
    assert "save_state=True" in said
    assert "no torch operation made one" not in said
