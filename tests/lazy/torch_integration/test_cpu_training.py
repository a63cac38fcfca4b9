"""A model that trains on the CPU although the device was started: one warning a process, few false alarms."""

from __future__ import annotations

import os

import forked

PROGRAM = """
import sys, warnings
import torch, xla_amp

def train(where, width=400, steps=12):
    model = torch.nn.Linear(width, width).to(where)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(1, width, device=where)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

device = xla_amp.xla_device()
for line in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exec(line)
    print(*[warning.message for warning in told])
"""


def told(*lines: str) -> list[str]:
    """The warnings of each line in a process that has started the device and not used it."""
    done = forked.run(*lines, program=PROGRAM, environment={**os.environ})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_is_told_once_and_short_comparisons_and_small_ones_beside_work_on_the_device_are_not() -> None:
    short, small, again = told("train('cpu', steps=9)", "train('cpu', width=8)", "train('cpu')")
    assert (short, again) == ("", "")
    assert "SGD has made 10 steps on 72 " in small
    assert "model.to(xla_amp.xla_device())" in small
    works, small, large = told("torch.ones(2, device=device).tolist()", "train('cpu', width=8)", "train('cpu')")
    assert (works, small) == ("", "")
    assert "SGD has made 10 steps on 160400 " in large


def test_nor_is_a_program_that_trains_on_the_device() -> None:
    assert told("train(device, width=2, steps=1)", "train('cpu')") == ["", ""]
