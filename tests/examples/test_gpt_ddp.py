"""examples/gpt_ddp.py in two processes: the numbers of one process, an overflow on one rank, a resumed run."""

from __future__ import annotations

import json
import re

import pytest
import scenarios
from source_tree import ROOT

EXAMPLE = ROOT / "examples" / "gpt_ddp.py"
SIZES = ["--json", "--precision", "fp32", "--sequences", "40", "--context", "16", "--layers", "1", "--width", "16"]
OVERFLOW = ("--overflow-at", "1")
pytestmark = [pytest.mark.full, pytest.mark.processes]  # tests/training/test_process_group.py has the parts of it


def run(world, *arguments):
    """What each process printed in the end, by rank."""
    done = scenarios.started(EXAMPLE, *SIZES, *arguments, folder="-", world=world, start="script")
    results = [json.loads(text) for text in re.findall("^result (.*)$", done.stdout, re.MULTILINE)]
    return sorted(results, key=lambda result: result["rank"])


@pytest.fixture(scope="module")
def alone():
    """One process with the batches of both."""
    return run(1, "--epochs", "2", *OVERFLOW, "--batch-size", "16")[0]


@pytest.fixture(scope="module")
def first_epoch(tmp_path_factory):
    """Two processes, and their checkpoint; the last rank alone overflows in the second step."""
    path = tmp_path_factory.mktemp("gpt_ddp") / "gpt.pt"
    return run(2, "--epochs", "1", *OVERFLOW, "--checkpoint", path), path


def check(found, alone, losses):
    first, second = found
    assert first["weights"] == second["weights"]
    assert first["scale"] == second["scale"] == alone["scale"] == 512.0
    assert len(first["losses"]) == len(losses) == 3  # the last batch is smaller
    assert first["losses"] == pytest.approx(losses, rel=1e-5)


def test_two_processes_have_the_numbers_of_one(first_epoch, alone):
    check(first_epoch[0], alone, alone["losses"][:3])


def test_a_resumed_run_goes_on_as_if_it_had_not_ended(first_epoch, alone):
    found = run(2, "--epochs", "1", "--checkpoint", first_epoch[1])
    check(found, alone, alone["losses"][3:])
    for process in found:
        assert process["sum"] == pytest.approx(alone["sum"], rel=1e-5)
        assert process["held_out"] == pytest.approx(alone["held_out"], rel=1e-5)
    assert alone["losses"][-1] < alone["losses"][0]


def test_two_lines_differ_from_a_script_for_cuda():
    """They name the backend and the device; the comment beside each is the line for CUDA."""
    code = EXAMPLE.read_text().partition('"""\n\n')[2].splitlines()
    assert [line.strip() for line in code if re.search("xla|jax", line)] == [
        'dist.init_process_group("xla_amp")  # "nccl"',
        'device = torch.device("jax")  # torch.device("cuda", local_rank)',
    ]
