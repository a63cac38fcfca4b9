"""Sinks: TensorBoard, JSON lines, and functions; each gets every step of a run in order."""

from __future__ import annotations

import json
import math

import pytest
import torch

import xla_amp
from xla_amp.tools.monitor import history
from xla_amp.tools.monitor.history import Statistics, StepRecord, ValueKey
from xla_amp.tools.monitor.sinks import JsonLines, TensorBoard, scalars


def record(step: int, sampled: bool = True, loss: float = 0.5) -> StepRecord:
    row = Statistics(amax=2.0, rms=1.0, underflow=0.25, inf=0.0, nan=0.0, headroom=15.0)
    rows = {ValueKey("h.0.attn", "activation"): row, ValueKey("", "activation"): row}
    return StepRecord(step=step, loss=loss, loss_scale=1024.0, skipped=step == 1, statistics=rows if sampled else {})


def train(**options):
    """A monitored run of four steps on the CPU; its monitor, closed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = xla_amp.monitor(model, optimizer, sample=2, **options)
    for index in range(4):
        with monitor.step() as running:
            running.loss = model(torch.full((2, 3), 1.0 + index)).sum()
            running.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    return monitor


def test_functions_get_each_step_in_order():
    one, other = [], []
    monitor = train(sinks=[one.append, lambda found: other.append((found.step, len(one)))])
    assert one == list(monitor.history.steps)
    assert [found.step for found in one] == [0, 1, 2, 3]
    assert [bool(found.statistics) for found in one] == [True, False, True, False]
    assert other == [(0, 1), (1, 2), (2, 3), (3, 4)], "after the first sink"


def test_json_lines_hold_what_the_monitor_has(tmp_path):
    monitor = train(directory=tmp_path / "new" / "run")
    path = tmp_path / "new" / "run" / "history.jsonl"
    assert history.read(path) == monitor.history
    train(directory=tmp_path / "new" / "run", first_step=4)  # the run goes on in the same file
    assert [found.step for found in history.read(path).steps] == list(range(8))
    assert [json.loads(line).get("format") for line in path.read_text().splitlines()].count(history.FORMAT) == 2


def test_json_lines_name_the_low_dtype_once(tmp_path):
    sink = JsonLines(tmp_path / "history.jsonl")
    sink(record(0, loss=math.nan), "float16")
    sink(record(1), "float16")
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[0]) == {"format": history.FORMAT, "low": "float16"}
    assert json.loads(lines[1], parse_constant=pytest.fail)["loss"] == "nan"


def test_scalars_by_name():
    found = scalars(record(1))
    assert found["loss"] == 0.5
    assert found["skipped"] == 1.0
    assert found["activation/h.0.attn/headroom"] == 15.0
    assert found["activation/model/amax"] == 2.0, "the root has a name"
    assert "gradient_norm" not in found
    assert "activation/h.0.attn/update_ratio" not in found
    assert set(scalars(StepRecord(step=0))) == {"skipped"}


def test_tensorboard_reads_back_what_was_recorded(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `examples`")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        monitor = train(sinks=[TensorBoard(writer)])
    events = EventAccumulator(str(tmp_path)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(found.step, pytest.approx(found.loss, rel=1e-6)) for found in monitor.history.steps]
    rms = [(event.step, event.value) for event in events.Scalars("gradient/0/rms")]
    key = ValueKey("0", "gradient")
    assert rms == [(step, pytest.approx(row.rms, rel=1e-6)) for step, row in monitor.history.of(key)]


def test_a_sink_that_fails_says_so_and_loses_nothing():
    given = []

    def sink(found):
        given.append(found.step)
        if found.step == 1:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        train(sinks=[sink])
    assert given == [0, 1]
