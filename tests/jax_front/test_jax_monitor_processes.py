"""The monitor of JAX in two processes: each keeps its part of the batch, and one process replays the whole step."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from monitor_on_two_processes import BAD, ROW, step

from xla_amp.errors import FileError
from xla_amp.jax import replay
from xla_amp.tools.monitor import bad_step, history

PROGRAM = Path(__file__).with_name("monitor_on_two_processes.py")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "XLA_FLAGS": ""}  # one device each
    runs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), rank, port, str(folder)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in "01"
    ]  # fmt: skip
    for run in runs:
        _, error = run.communicate(timeout=240)
        assert run.returncode == 0, error
    return folder


def test_each_process_keeps_its_part(directory):
    found = [bad_step.read(folder) for folder in bad_step.ranks(directory)]
    assert [(bad.rank, bad.world_size, bad.step) for bad in found] == [(0, 2, BAD), (1, 2, BAD)]
    assert [bad.options["parts"]["1"]["places"] for bad in found] == [[[[0, 2], [0, 4]]], [[[2, 4], [0, 4]]]]
    histories = [history.read(directory / name) for name in ("history.jsonl", "history_rank_1.jsonl")]
    assert [record.step for record in histories[0].steps] == list(range(6))
    assert repr(histories[0].steps) == repr(histories[1].steps), "statistics are of the whole arrays"


def test_one_process_replays_the_step_and_names_the_rank(directory):
    found = replay(step, directory, jnp.zeros((4, 4)), jnp.zeros((4, 4)))
    assert found.reproduced
    assert found.overflow.first.element[0] == ROW
    assert found.rank == 1
    facts = dict(found.document().facts)
    assert facts["process"] == "1 of 2"
    text = " ".join(str(found).split())
    assert f"step {BAD}: its loss was not finite" in text
    assert f"Is the step the same, bit for bit? yes, {found.compared} numbers" in text


def test_a_missing_part_is_an_error(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "run")
    shutil.rmtree(bad_step.folder(tmp_path / "run", BAD, 1))
    with pytest.raises(FileError, match="argument 1 has a part in no folder"):
        replay(step, tmp_path / "run", jnp.zeros((4, 4)), jnp.zeros((4, 4)))
    assert np.load(bad_step.folder(directory, BAD, 0) / "batch.npz")["1.0"].shape == (2, 4)
