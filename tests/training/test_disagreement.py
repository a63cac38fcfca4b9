"""Processes that come to disagree: an error on all within the timeout that names process and line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import forked
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.full]

PROGRAM = Path(__file__).with_name("disagree_program.py")


def run(seconds, *cases):
    """(exit status, seconds, text) of both processes, by case."""
    with tempfile.TemporaryDirectory() as folder:
        forked.run(PROGRAM, folder, str(seconds), *cases)
        codes = json.loads(Path(folder, "codes.json").read_text())
        return {
            case: [(*codes[f"{case}-{rank}"], Path(folder, f"{case}-{rank}").read_text()) for rank in range(2)]
            for case in cases
        }


def says(found, *words):
    status, _, text = found
    assert status != 0, text
    for word in words:
        assert word in text


def test_a_process_that_alone_has_a_new_program_ends_early_or_fails_is_named():
    found = run(40, "read", "shape", "end", "kill", "kill first", "raise")
    waited = "EngineError: process 1 waited in vain for process 0 at 'a new program'"
    for case in ("read", "shape"):  # the other runs its known program
        other, alone = found[case]
        says(alone, waited, "(XLA_AMP_TIMEOUT is 40 s", "disagree_program.py:", ": xla_amp.sync(wait=True); ")
        says(other, "StepFailedError: ", "process 1 (", f"has failed ({waited}")
    for each in found["end"]:  # JAX's
        says(each, "The first task at the barrier: 1. Some timed out task names:")
    for status, _, text in (found["kill"][0], found["kill first"][1]):  # the connection's error, or JAX's of heartbeats
        assert (status != 0, re.search("another process has ended|detected fatal errors", text) is not None) == (
            True,
            True,
        )
    says(found["raise"][0], "process 1 (", "has failed (ValueError: this one has had enough)")
    says(found["raise"][1], "\nValueError: this one has had enough")


def test_processes_that_are_slow_or_do_what_is_their_own_go_on():
    """A factor of a process's batch, and a value that it still holds when the next program could overwrite it."""
    found = run(120, "stop", "factor", "hold", "hold, function")
    for case, both in found.items():
        assert [status for status, *_ in both] == [0, 0], both
        first, second = (re.findall("finished .*", text) for _, _, text in both)
        assert first == second != [], case


def test_torchrun_starts_a_killed_job_again_and_it_ends_as_an_undisturbed_one(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["--max-restarts", "1", str(PROGRAM.with_name("elastic_program.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_AMP_TIMEOUT": "120"}
    done = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads(Path(tmp_path, f"{rank}.json").read_text())
        disturbed, undisturbed = found["disturbed"], found["undisturbed"]
        assert (found["restarts"], disturbed["first"], undisturbed["first"]) == (1, 7, 0)
        assert disturbed["weights"] == undisturbed["weights"]
        assert disturbed["losses"] == {step: undisturbed["losses"][step] for step in disturbed["losses"]}
