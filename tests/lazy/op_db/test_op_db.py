"""Every entry of torch's operator database agrees with the CPU, or is a row of the limitations table."""

from __future__ import annotations

import re

import pytest
import torch
from limitations import Limitation, limitations
from op_entries import ENTRIES, anything, failures, near, same_moments

SAMPLES = 2
COMPARISON = {"random": lambda row: same_moments, "unset": lambda row: anything}


def comparison(row: Limitation | None):
    """Of each sample: by the row, or as of all entries where there is none or it is not for this sample."""

    def of(sample):
        if row is None or (row.where and not sample.kwargs.get(row.where)):
            return near(1)
        return COMPARISON.get(row.kind, lambda row: near(row.tolerance))(row)

    return of


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_entry(name, lazy):
    row = limitations().get(name)
    ran, failed = failures(ENTRIES[name], lazy, SAMPLES, comparison(row))
    if row is not None and row.kind == "raises":
        assert [failure for failure in failed if failure.stage == "raises"], "it works now: delete its row"
        assert all(failure.stage == "raises" and row.error in failure.message for failure in failed), failed
        return
    assert ran
    assert not failed, failed


def test_every_row_names_an_entry():
    assert not set(limitations()) - set(ENTRIES)


def test_at_least_95_percent_of_the_entries_have_no_row_that_raises():
    assert sum(row.kind == "raises" for row in limitations().values()) <= 0.05 * len(ENTRIES)


class Twin:
    """An entry whose function is wrong on the lazy device only."""

    def __init__(self, wrong):
        self.entry, self.wrong = ENTRIES["sin"], wrong

    def __getattr__(self, name):
        return getattr(self.entry, name)

    def __call__(self, x):
        return self.entry(x) if x.device.type == "cpu" else self.wrong(x)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: x.sin() + 1e-4, r"outputs\[0\].*not close"),
        (lambda x: x.sin().to(torch.bfloat16), "bfloat16.*expected torch.float32"),
        (lambda x: x.bfloat16().sin().float(), "not close"),
        (lambda x: x.detach().sin() + (x - x.detach()) * x.detach().cos() * 1.001, r"gradients\[0\].*not close"),
        (lambda x: x.sin()[None], "expected torch.float32"),
    ],
    ids=["value", "dtype", "precision", "gradient", "shape"],
)
def test_what_is_wrong_is_found(wrong, said, lazy):
    _, failed = failures(Twin(wrong), lazy, 1, lambda sample: near(1))
    assert [failure.stage for failure in failed] == ["differs"]
    assert re.search(said, failed[0].message)
