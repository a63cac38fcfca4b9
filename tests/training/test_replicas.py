"""Two real processes that hold replicas: buffers are sent in the step, and a hook adds gradients.

The rule for sums is in tests/policy/test_gradient_rule.py, sums of two processes in test_processes.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import scenarios
import torch
from replicas_program import MODES

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("replicas_program.py")


@pytest.fixture(scope="module")
def found():
    """What both processes saw."""
    parts = scenarios.run(PROGRAM, "buffers", "hook", start="group")
    return [{name: each[rank] for name, each in parts.items()} for rank in range(2)]


@pytest.mark.parametrize("mode", MODES)
def test_buffers_are_sent_in_the_step(found, mode):
    """Against torch's class on the CPU: the same weights and buffers, in one executable a step after the second.

    In a group of gloo each copy of the buffers is an executable for itself.
    """
    for rank, process in enumerate(found):
        result = process["buffers"][mode]
        (got, read), (expected, read_there) = result["got"], result["expected"]
        assert list(got) == list(expected)
        for name, value in got.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]), rtol=0, atol=1e-6)
        assert len(read) == len(read_there) == (rank == 0)
        assert read == pytest.approx(read_there, abs=1e-5)
        if "gloo" not in mode:
            assert result["counts"][-1] == {"executions": 1, "compilations": 0, "host_syncs": 0}


def test_a_communication_hook_adds_in_float32(found):
    """The sum of 60000 and 60000 is inf in float16; the hook is a part of the step's executable."""
    for process in found:
        assert process["hook"]["gradient"] == 60000.0
        assert process["hook"]["counts"][2:] == [1, 1]
