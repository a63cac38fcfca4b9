"""The limitations table: its rows, and the page that is written from it."""

from __future__ import annotations

import subprocess
import sys

from limitations import limitations
from source_tree import ROOT


def test_every_row_is_whole_and_in_order():
    rows = list(limitations().values())
    table = (ROOT / "tests" / "helpers" / "limitations.toml").read_text("utf-8")
    assert 0 < len(rows) == table.count("[[limitation]]")  # no operation has two
    assert rows == sorted(rows, key=lambda row: row.operation)
    for row in rows:
        assert row.kind in ("raises", "random", "tolerance", "unchecked", "unset"), row
        assert len(row.reason) > 10, row
        assert bool(row.error) == (row.kind == "raises"), row
        assert (row.tolerance != 1) == (row.kind == "tolerance"), row
        assert not row.where or row.kind == "random", row


def test_the_support_page_is_up_to_date():
    done = subprocess.run([sys.executable, "scripts/result_tables.py", "operations", "--check"], cwd=ROOT)
    assert done.returncode == 0
    page = (ROOT / "docs" / "lists" / "operations.md").read_text("utf-8")
    assert all(f"| `{row.operation}` |" in page for row in limitations().values())
