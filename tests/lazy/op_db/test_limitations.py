"""The limitations table: its rows, its loader's errors, and the page that is written from it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from limitations import KINDS, limitations, parse

from xla_amp.errors import EngineError

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROW = '[[limitation]]\noperation = "{}"\nkind = "random"\nreason = "drawn"\n'


def test_every_row_has_a_reason():
    assert limitations()
    for row in limitations().values():
        assert row.kind in KINDS, row
        assert len(row.reason) > 10, row


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ROW.format("b") + ROW.format("a"), "'a' after 'b'"),
        (ROW.format("a") + ROW.format("a"), "'a' after 'a'"),
        (ROW.format("a").replace("random", "broken"), "'broken'"),
        (ROW.format("a").replace("reason", "why"), "unknown columns"),
        (ROW.format("a").replace('reason = "drawn"', ""), "lacks"),
        (ROW.format("a") + "tolerance = 2.0\n", "'tolerance' belongs"),
        (ROW.format("a").replace("random", "raises"), "'error' belongs"),
        (ROW.format("a").replace("random", "unset") + 'where = "p"\n', "'where' belongs"),
    ],
    ids=["order", "twice", "kind", "column", "absent", "tolerance", "error", "where"],
)
def test_mistakes_in_the_table(text, said):
    with pytest.raises(EngineError, match=said):
        parse(text)


def check() -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "scripts/result_tables.py", "operations", "--check"], cwd=ROOT, capture_output=True
    )


def test_the_support_page_is_up_to_date():
    assert check().returncode == 0
    page = (ROOT / "docs" / "lists" / "operations.md").read_text("utf-8")
    assert all(f"| `{row.operation}` |" in page for row in limitations().values())
