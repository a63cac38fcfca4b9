"""scripts/result_tables.py frameworks: from results of tests to the table of docs/frameworks.md, and back."""

from __future__ import annotations

import result_tables

TEXT = result_tables.FRAMEWORKS.read_text("utf-8")


def test_the_page_has_the_table_and_no_empty_cell_of_a_count() -> None:
    rows = result_tables.framework_rows(TEXT)
    assert result_tables.framework_text(rows) in TEXT
    assert {"Lightning", "Accelerate", "Trainer"} <= {framework for framework, _ in rows}
    assert all(row["waits a step"] == "0" for row in rows.values())
