"""scripts/result_tables.py frameworks: from results of tests to the table of docs/frameworks.md, and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import result_tables

TEXT = result_tables.FRAMEWORKS.read_text("utf-8")

TEST = """
def test_it(record_property):
    record_property("framework", '{"framework": "F", "precision": "bf16", "waits a step": "0"}')

def test_more(record_property):
    record_property("framework", '{"framework": "F", "precision": "bf16", "executables a step": "1"}')
"""


def test_the_page_has_the_table_and_no_empty_cell_of_a_count() -> None:
    rows = result_tables.framework_rows(TEXT)
    assert result_tables.framework_text(rows) in TEXT
    assert {"Lightning", "Accelerate", "Trainer"} <= {framework for framework, _ in rows}
    assert all(row["waits a step"] == "0" for row in rows.values())


@pytest.mark.full
def test_recorded_results_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junit-xml=report.xml", "test_some.py"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    found = result_tables.recorded([tmp_path / "report.xml"])
    assert found == {("F", "bf16"): {"executables a step": "1", "waits a step": "0", "save and resume": ""}}
    page = tmp_path / "page.md"
    page.write_text(
        "above\n" + result_tables.framework_text({("F", "bf16"): {"a": "2", "b": "0", "c": ""}}) + "below\n"
    )
    monkeypatch.setattr(result_tables, "FRAMEWORKS", page)
    result_tables.write_frameworks([tmp_path / "report.xml"])
    assert result_tables.framework_rows(page.read_text()) == found
    assert page.read_text().startswith("above\n")
    assert page.read_text().endswith("below\n")
