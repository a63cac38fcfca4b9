"""One process, eight (virtual) devices: the same losses in every layout, one program, the collectives one expects."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xla_amp
from xla_amp.errors import DeviceError


@functools.cache
def run(layout):
    command = [sys.executable, str(Path(__file__).with_name("spmd_program.py")), layout]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", ["data", "sharded", "tensor"])
def test_the_numbers_are_those_of_one_device(layout):
    found, expected = run(layout), run("single")
    pairs = zip(found["losses"] + found["weights"], expected["losses"] + expected["weights"], strict=True)
    finite = [(a, b) for a, b in pairs if math.isfinite(b) or math.isfinite(a)]
    assert len(finite) >= 11  # the step that overflows has no loss
    for one, other in finite:
        assert one == pytest.approx(other, rel=1e-5)
    assert (found["scale"], found["skipped"]) == (expected["scale"], expected["skipped"]) == (512.0, 1)


@pytest.mark.parametrize("layout", ["data", "sharded", "tensor"])
def test_a_step_is_one_executable_without_host_sync(layout):
    assert run(layout)["steady"] == {"executions": 1, "compilations": 0, "host_syncs": 0}


def test_collectives():
    assert run("single")["collectives"] == {}
    assert set(run("data")["collectives"]) == {"all-reduce"}
    assert run("data")["collectives"]["all-reduce"] <= 2  # all gradients in one, the loss in another
    assert run("sharded")["collectives"]["all-gather"] >= 1
    assert set(run("tensor")["collectives"]) <= {"all-reduce", "all-gather"}


def test_memory_falls_with_the_number_of_devices():
    """Of parameters and of the optimizer's state, which follows them."""
    assert run("data")["shards"]["0.weight"] == [1, 1]
    for shares in run("sharded")["shards"].values():
        assert shares == [1 / 8, 1 / 8]
    assert run("tensor")["shards"] == {
        "0.weight": [1 / 2, 1 / 2],
        "0.bias": [1 / 2, 1 / 2],
        "2.weight": [1 / 2, 1 / 2],
        "2.bias": [1, 1],
    }


@pytest.fixture(scope="module")
def mesh():
    return xla_amp.make_mesh({"data": 1})


def on_device(*shape):
    return torch.ones(*shape, device=xla_amp.xla_device())


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda mesh: xla_amp.make_mesh({"data": 3}), DeviceError, r"product is the number of devices, 1, got 3"),
        (lambda mesh: xla_amp.mark_sharding(torch.ones(2), mesh, ()), DeviceError, "expects a tensor on 'jax', got"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2), mesh, ("model",)), ValueError, "does not know the axis 'mod"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2, 2), mesh, ("data", "data")), ValueError, "repeats the axis"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2), mesh, (None, None)), ValueError, "one entry per dimension"),
        (lambda mesh: xla_amp.mark_sharding(on_device(2), mesh, "data"), ValueError, "one entry per dimension"),
        (lambda mesh: xla_amp.mark_sharding(on_device(4)[1:], mesh, ("data",)), DeviceError, "got a view of shape"),
    ],
)
def test_bad_input(call, kind, words, mesh):
    with pytest.raises(kind, match=words):
        call(mesh)
    assert xla_amp.engines.jax.mesh.active is None
