"""The first bad step is kept, with the state before it, and `find_overflow` runs the user's step on it."""

from __future__ import annotations

import math
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp.errors import FileError, StepError
from xla_amp.tools.monitor import kept

RARE, BAD, ELEMENT = 12, 7, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(F.relu(self.up(x))))


def make(where: str, seed: int = 1):
    """A model in which the embedding of one token overflows float16 in the block."""
    torch.manual_seed(seed)
    device = torch.device("cpu") if where == "cpu" else xla_amp.xla_device()
    model = nn.Sequential(nn.Embedding(RARE + 1, 4), Block(), nn.Linear(4, RARE + 1))
    with torch.no_grad():
        model[0].weight[RARE] = 200.0
        model[1].up.weight[3] = 100.0 * seed
    model.to(device)
    on_cpu = where == "cpu"
    optimizer = (torch.optim if on_cpu else xla_amp.syncfree).SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if on_cpu else xla_amp.GradScaler(init_scale=64.0)

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16) if on_cpu else xla_amp.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return model, optimizer, scaler, xla_amp.compile(step, strict=True) if where == "captured" else step


def on_host(model, optimizer):
    states = [model.state_dict(), *optimizer.state_dict()["state"].values()]
    return [{name: value.detach().cpu().clone() for name, value in state.items()} for state in states]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module", params=["cpu", pytest.param("xla", marks=pytest.mark.full), "captured"])
def run(request, tmp_path_factory):
    """A run whose step `BAD` overflows: where, its monitor, what it said, and all state before that step."""
    model, optimizer, scaler, step = make(request.param)
    monitor = xla_amp.monitor(model, optimizer, scaler, directory=tmp_path_factory.mktemp("run"))
    made = torch.Generator().manual_seed(4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for index in range(12):
            x, y = (torch.randint(0, RARE, (4, 5), generator=made) for _ in "xy")
            if index == BAD:
                x[ELEMENT, 1] = RARE
                before, generator = on_host(model, optimizer), torch.get_rng_state()
            x, y = x.to(model[2].weight.device), y.to(model[2].weight.device)
            with monitor.step(x, y) as running:
                running.loss = step(x, y)
        monitor.close()
    lines = [str(each.message) for each in said if "is bad" in str(each.message)]
    return request.param, monitor, lines, before, generator


def test_the_first_bad_step_is_kept_with_the_state_before_it(run):
    where, monitor, lines, before, generator = run
    assert monitor.history.of("bad") == [index == BAD for index in range(12)]
    assert monitor.history.steps[BAD].skipped
    assert monitor.kept.name == f"step-{BAD}"
    (line,) = lines
    assert line.startswith(f"monitor: step {BAD} is bad: the loss is nan; the first layer with an inf or NaN is 1.up; ")
    assert f"Type xla_amp.find_overflow(step, kept={str(monitor.kept)!r})" in line
    model, optimizer, scaler, _ = make(where, seed=3)
    random.seed(5)
    x, y = kept.restore(monitor.kept, [nn.Linear(1, 1), model, optimizer, scaler])
    assert_same(on_host(model, optimizer), before)
    assert (scaler.get_scale(), x[ELEMENT, 1].item(), y.device) == (64.0, RARE, model[2].weight.device)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(
    "run",
    ["cpu", pytest.param("xla", marks=pytest.mark.full), pytest.param("captured", marks=pytest.mark.full)],
    indirect=True,
)
def test_find_overflow_runs_the_step_on_what_was_kept(run):
    where, monitor, *_ = run
    model, optimizer, _, step = make(where, seed=3)
    now = on_host(model, optimizer)
    report = xla_amp.find_overflow(step, kept=monitor.kept)
    assert report.first.place.module == "1.up"
    assert report.scale == 64.0
    assert_same(on_host(model, optimizer), now)  # everything is as before
    if where == "cpu":
        given = torch.zeros((4, 5), dtype=torch.int64)
        assert xla_amp.find_overflow(step, given, given, kept=monitor.kept).first is None, "another batch"


def test_what_does_not_fit_is_named(run, tmp_path):
    where, monitor, *_ = run
    model, optimizer, _, step = make(where)
    with pytest.raises(FileError, match="no step is kept here: expected a folder step-N with a file rank-0"):
        xla_amp.find_overflow(step, kept=tmp_path)
    (tmp_path / "rank-0.pt").write_bytes(b"nonsense")
    with pytest.raises(FileError, match="no kept step of a monitor"):
        xla_amp.find_overflow(step, kept=tmp_path)
    with pytest.raises(StepError, match="expected a Module that the kept state fits, and the step reaches Linear; "):
        kept.restore(monitor.kept, [nn.Linear(1, 1)])
    with pytest.raises(StepError, match="expected a GradScaler"):
        kept.restore(monitor.kept, [model, optimizer])


def train(directory, scaler, batch, steps=4, **options):
    """Steps of which the last has an inf; the monitor."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = xla_amp.monitor(model, optimizer, scaler, directory=directory, **options)
    for index in range(steps):
        x = torch.full((2, 4), math.inf if index == steps - 1 else 1.0)
        with monitor.step(batch(x)) as running:
            optimizer.zero_grad()
            running.loss = model(x).sum()
            (running.loss if scaler is None else scaler.scale(running.loss)).backward()
            optimizer.step() if scaler is None else scaler.step(optimizer)
            scaler.update() if scaler is not None else None
    monitor.close()
    return monitor


def test_without_a_scaler_nothing_is_kept_and_that_is_said_once(tmp_path, recwarn):
    monitor = train(tmp_path, None, lambda x: x)
    assert monitor.history.of("bad") == [False, False, False, True]
    assert (monitor.kept, list(tmp_path.iterdir())) == (None, [])
    unguarded, bad = [str(each.message) for each in recwarn]
    assert "nothing guards the update" in unguarded
    assert "Type xla_amp.monitor(model, optimizer, xla_amp.GradScaler(), directory=...)" in unguarded
    assert bad.endswith("Type xla_amp.find_overflow(step) to find the operation")


def test_a_step_that_cannot_be_written_does_not_end_the_run(tmp_path, recwarn):
    monitor = train(tmp_path, torch.amp.GradScaler("cpu"), lambda x: {"x": {1, 2}})
    assert monitor.kept is None
    assert "it could not be kept: TypeError: expected a batch of tensors" in str(recwarn[0].message)


def test_containers_of_a_batch_come_back(tmp_path, recwarn):
    monitor = train(tmp_path, torch.amp.GradScaler("cpu"), lambda x: {"x": [x, (1, None)], "name": "text"})
    model = nn.Linear(4, 1)
    objects = model, torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    (batch,) = kept.restore(monitor.kept, objects)
    x, rest = batch["x"]
    assert (bool(x.isinf().all()), rest, batch["name"]) == (True, (1, None), "text")


def test_a_search_for_the_scale_is_no_bad_step(tmp_path, recwarn):
    model = nn.Linear(4, 4).to(xla_amp.xla_device())
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=1e-3)
    scaler = xla_amp.GradScaler(init_scale=2.0**127, growth_interval=3, max_scale=2.0**127)
    monitor = xla_amp.monitor(model, optimizer, scaler, directory=tmp_path)
    x = torch.ones(2, 4).to(xla_amp.xla_device())
    for _ in range(9):
        with monitor.step(x) as running:
            optimizer.zero_grad()
            running.loss = (model(x) * 4.0).square().sum()
            scaler.scale(running.loss).backward()
            scaler.step(optimizer)
            scaler.update()
    skipped = monitor.read().of("skipped")
    monitor.close()
    assert skipped[0], "the search at the beginning"
    assert sum(skipped) >= 2, "and a probe after growth"
    assert monitor.kept is None
    assert not list(recwarn)
