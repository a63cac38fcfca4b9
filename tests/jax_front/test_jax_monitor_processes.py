"""The monitor of JAX in two processes: they keep one step together, and one process runs it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from monitor_on_two_processes import BAD, ROW, step

from xla_amp.jax import LossScale, find_overflow
from xla_amp.tools.monitor.on_jax import load

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("monitor_on_two_processes.py")


@pytest.mark.full
def test_two_processes_keep_one_step_and_one_process_runs_it(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "XLA_FLAGS": ""}  # one device each
    runs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), rank, port, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in "01"
    ]  # fmt: skip
    said = []
    for run in runs:
        out, error = run.communicate(timeout=240)
        assert run.returncode == 0, error
        said.append(out.splitlines()[-1])
    assert said[0] == said[1], "numbers are of the whole arrays"
    assert said[0].endswith(f"step-{BAD}")
    like = jnp.zeros((4, 4)), LossScale.dynamic(), jnp.zeros((4, 4))
    _, scale, x = load(tmp_path / f"step-{BAD}", like)
    assert float(scale.value) == 16.0
    assert (jnp.abs(x).max(axis=1) > 1e5).tolist() == [row == ROW for row in range(4)]
    found = find_overflow(step, *like, kept=tmp_path / f"step-{BAD}")
    assert found.first.element[0] == ROW
