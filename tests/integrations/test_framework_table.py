"""scripts/framework_table.py: from results of tests to the table of docs/frameworks.md, and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import framework_table
import pytest

TEXT = framework_table.PAGE.read_text("utf-8")

TEST = """
def test_it(record_property):
    record_property("framework", '{"framework": "F", "precision": "bf16", "waits a step": "0"}')

def test_more(record_property):
    record_property("framework", '{"framework": "F", "precision": "bf16", "executables a step": "1"}')
"""


def test_the_page_has_the_table_and_no_empty_cell_of_a_count() -> None:
    rows = framework_table.rows(TEXT)
    assert framework_table.table(rows) in TEXT
    assert {"Lightning", "Accelerate", "Trainer"} <= {framework for framework, _ in rows}
    assert all(row["waits a step"] == "0" for row in rows.values())


def test_recorded_results_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junit-xml=report.xml", "test_some.py"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    found = framework_table.recorded([tmp_path / "report.xml"])
    assert found == {("F", "bf16"): {"executables a step": "1", "waits a step": "0", "save and resume": ""}}
    page = tmp_path / "page.md"
    page.write_text("above\n" + framework_table.table({("F", "bf16"): {"a": "2", "b": "0", "c": ""}}) + "below\n")
    monkeypatch.setattr(framework_table, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["framework_table.py", str(tmp_path / "report.xml")])
    assert framework_table.main() == 0
    assert framework_table.rows(page.read_text()) == found
    assert page.read_text().startswith("above\n")
    assert page.read_text().endswith("below\n")
