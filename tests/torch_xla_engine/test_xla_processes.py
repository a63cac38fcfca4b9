"""Collectives on torch_xla: its own operations, in the step's program.

torch_xla's CPU client has one device (with a second the process is ended), so what two processes would run is looked at
as a program, and what runs here are groups of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from xla_amp import xla_model
from xla_amp.engines import base


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    environment = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("two_processes.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("reduce_gradients", "all-reduce"),
        ("all_reduce", "all-reduce"),
        ("all_gather", "all-reduce"),  # of values padded with zeros
        ("reduce_scatter", "reduce-scatter"),
        ("collective_broadcast", "all-reduce"),  # of zeros, but for the root
    ],
)
def test_two_processes_run_torch_xlas_collectives(programs, name, operation):
    for kind in [name, f"{name} in groups"]:
        assert f" {operation}(" in programs[kind], programs[kind]
        assert f" {operation}(" not in programs["no collective"]


@pytest.mark.parametrize("groups", [None, ((0,),)], ids=["all", "groups"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("all_gather", {"dim": 0}),
        ("reduce_scatter", {"reduce_type": "sum", "dim": 0}),
        ("collective_broadcast", {"root": 0}),
    ],
)
def test_collectives_of_one(name, options, groups):
    tensor = torch.arange(4.0).to("xla")
    [result] = base.processes().collective(name, [tensor], groups, **options)
    assert result.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_script_of_one_process():
    assert (xla_model.xrt_world_size(), xla_model.get_ordinal(), xla_model.is_master_ordinal()) == (1, 0, True)
    assert xla_model.rendezvous("here", b"mine") == [b"mine"]
    assert xla_model.mesh_reduce("there", 3, sum) == 3


def test_gradients_of_sums_can_be_reduced_in_place():
    """torch_xla 2.9 adds where it should overwrite a tensor whose elements share memory."""
    weight = nn.Parameter(torch.ones(2).to("xla"))
    weight.sum().backward()
    [reduced] = base.processes().collective("all_reduce", [weight.grad], None, reduce_type="sum", pin_layout=True)
    weight.grad.copy_(reduced * 3)
    assert weight.grad.tolist() == [3.0, 3.0]
