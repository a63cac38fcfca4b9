"""The limitations table: its rows, and the page that is written from it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from limitations import limitations
from source_tree import ROOT


def test_every_row_is_whole_and_in_order():
    rows = list(limitations().values())
    table = (ROOT / "tests" / "helpers" / "limitations.toml").read_text("utf-8")
    assert 0 < len(rows) == table.count("[[limitation]]")  # no operation has two
    assert rows == sorted(rows, key=lambda row: row.operation)
    for row in rows:
        assert row.kind in ("raises", "random", "tolerance", "ties", "unchecked", "unset"), row
        assert len(row.reason) > 10, row
        assert bool(row.error) == (row.kind == "raises"), row
        assert (row.tolerance != 1) == (row.kind == "tolerance"), row
        assert not row.where or row.kind == "random", row


def test_the_support_page_is_up_to_date():
    done = subprocess.run([sys.executable, "scripts/result_tables.py", "operations", "--check"], cwd=ROOT)
    assert done.returncode == 0
    page = (ROOT / "docs" / "lists" / "operations.md").read_text("utf-8")
    assert all(f"| `{row.operation}` |" in page for row in limitations().values())


def stable(x):
    return np.argsort(x.numpy(), axis=1, kind="stable")


def stable_descending(x):
    return np.argsort(-x.numpy(), axis=1, kind="stable")


def last_of_the_most_frequent(x):
    counts = [np.bincount(row.astype(int)) for row in x.numpy()]
    return [[np.flatnonzero(row == count.argmax())[-1]] for row, count in zip(x.numpy(), counts, strict=True)]


POSITIONS = {
    "argsort": [(lambda x: x.argsort(1), stable)],
    "kthvalue": [(lambda x: x.kthvalue(9, 1, True)[1], lambda x: stable(x)[:, 8:9])],
    "mode": [(lambda x: x.mode(1, True)[1], last_of_the_most_frequent)],
    "sort": [
        (lambda x: x.sort(1)[1], stable),
        (lambda x: x.sort(1, descending=True)[1], stable_descending),
    ],
    "topk": [
        (lambda x: x.topk(5)[1], lambda x: stable_descending(x)[:, :5]),
        (lambda x: x.topk(5, largest=False)[1], lambda x: stable(x)[:, :5]),
    ],
}
"""Operation -> its positions, and those that its row promises."""


def test_rows_of_ties():
    assert {name for name, row in limitations().items() if row.kind == "ties"} == set(POSITIONS)


@pytest.mark.parametrize("name", POSITIONS)
def test_of_equal_elements_the_row_says_which(name, device):
    x = torch.randint(5, (50, 40), generator=torch.Generator().manual_seed(0)).float()
    for call, promised in POSITIONS[name]:
        assert call(x.to(device)).tolist() == np.asarray(promised(x)).tolist()
        assert torch.equal(x.gather(1, call(x.to(device)).cpu()), x.gather(1, call(x)))  # the CPU's values
