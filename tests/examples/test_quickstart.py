"""The notebook runs as a reader runs it, and what it says about its results is so."""

from __future__ import annotations

import ast

import nbclient
import nbformat
import pytest
from source_tree import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


@pytest.mark.exhaustive
def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(NOTEBOOK, nbformat.current_nbformat)
    nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    printed = [output["text"] for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    lines = [line for text in printed for line in text.splitlines() if "last loss" in line]
    assert [line.split()[0] for line in lines] == ["float32", "bfloat16", "float16"]
    for line in lines:
        assert float(line.split()[3]) < 0.2
        cost = ast.literal_eval(line[line.index("{") :])
        assert cost["executions"] == 150  # one a step
        assert cost["host_syncs"] == 0
        assert cost["compilations"] <= 3
    assert any("asked for by policy.override" in text for text in printed)


def test_it_is_committed_without_results() -> None:
    """A result in the file would be of another version."""
    notebook = nbformat.read(NOTEBOOK, nbformat.current_nbformat)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
