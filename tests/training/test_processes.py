"""Processes that train together on loopback: one device each, gradients reduced in the step, one mind on overflow."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import xla_amp
from xla_amp import config, xla_model
from xla_amp.config import Process
from xla_amp.errors import PolicyError

PROGRAM = Path(__file__).with_name("replica_program.py")


def start(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_AMP_TIMEOUT": "60"}
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)


@functools.cache
def run(world, *overflows):
    """What each process saw, by overflow."""
    with tempfile.TemporaryDirectory() as folder:
        done = start(folder, str(world), *overflows)
        assert done.returncode == 0, done.stderr
        return {
            overflow: [json.loads(Path(folder, f"{world}-{overflow}-{rank}.json").read_text()) for rank in range(world)]
            for overflow in overflows
        }


def alone():
    return run(1, "none", "one")


def together(world):
    return run(world, "none", "one", "unreduced")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("overflow", ["none", "one"])
def test_the_numbers_are_those_of_one_process_with_the_whole_batch(world, overflow):
    found, (expected,) = together(world)[overflow], alone()[overflow]
    finite = [place for place, loss in enumerate(expected["losses"]) if math.isfinite(loss)]
    assert len(finite) >= 12
    for process in found:
        for place in finite:
            assert process["losses"][place] == pytest.approx(expected["losses"][place], rel=1e-5)
        assert process["sum"] == pytest.approx(expected["sum"], rel=1e-5)
        assert (process["scale"], process["skipped"]) == (expected["scale"], expected["skipped"])
    assert expected["skipped"] == 20 - len(finite)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("overflow", ["none", "one", "unreduced"])
def test_all_skip_the_same_steps_and_stay_bitwise_equal(world, overflow):
    """Also with gradients of their own (`unreduced`), where the weights differ and the skipped steps do not."""
    first, *others = together(world)[overflow]
    for process in others:
        assert (process["scale"], process["skipped"]) == (first["scale"], first["skipped"])
        assert (process["weights"] == first["weights"]) == (overflow != "unreduced")
    assert (first["skipped"] > 0) == (overflow != "none")


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_is_one_executable_without_host_sync(world):
    for processes in together(world).values():
        for process in processes:
            assert process["steady"] == {"executions": 1, "compilations": 0, "host_syncs": 0}


def test_processes_meet():
    for rank, process in enumerate(together(2)["none"]):
        assert process["ordinal"] == [rank, 2]
        assert process["met"] == ["0", "1"]
        assert process["most"] == 1


def test_when_one_fails_the_others_end_and_the_error_has_its_number(tmp_path):
    done = start(str(tmp_path), "2", "fail")
    assert done.returncode != 0
    assert "Process 1 terminated with the following error" in done.stderr
    assert "this one has had enough" in done.stderr


def test_the_place_of_a_process(monkeypatch):
    assert config.process() is None
    assert xla_model.xrt_world_size() == 1
    config.place_process(rank=1, world_size=2, port=100)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.pop(name)
        monkeypatch.setenv(name, value)
    assert config.process() == Process(1, 2, 1, "127.0.0.1:101", 300, True)
    monkeypatch.setenv("XLA_AMP_COORDINATOR", "somewhere:5")
    monkeypatch.setenv("XLA_AMP_TIMEOUT", "9")
    assert config.process() == Process(1, 2, 1, "somewhere:5", 9, True)
    monkeypatch.delenv("XLA_AMP_COORDINATOR")
    for name, value, words in (
        ("RANK", "2", r"RANK='2': expected a number from 0 to 1"),
        ("MASTER_PORT", "", "MASTER_ADDR and MASTER_PORT must say where process 0 is"),
        ("WORLD_SIZE", "two", "WORLD_SIZE='two': expected a whole number"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(PolicyError, match=words):
                config.process()


def test_bad_input():
    with pytest.raises(ValueError, match=r"launch\(nprocs=0\): expected at least 1"):
        xla_amp.launch(print, 0)
