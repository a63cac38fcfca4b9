"""The notebook runs as a reader runs it, and what is kept of its results is so."""

from __future__ import annotations

import ast
from typing import Any

import docs_figures
import nbformat
import pytest


def printed(notebook: Any) -> list[str]:
    return [output["text"] for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]


@pytest.fixture
def kept() -> Any:
    return nbformat.read(docs_figures.NOTEBOOK, nbformat.current_nbformat)


@pytest.mark.full
def test_it_runs_and_prints_what_is_kept(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    losses, *reports = printed(docs_figures.run_notebook())
    lines = [line for line in losses.splitlines() if "last loss" in line]
    assert [line.split()[0] for line in lines] == ["float32", "bfloat16", "float16"]
    for line in lines:
        assert float(line.split()[3]) < 0.2
        cost = ast.literal_eval(line[line.index("{") :])
        assert cost["executions"] == 150  # one a step
        assert cost["host_syncs"] == 0
        assert cost["compilations"] <= 3
    assert reports == printed(kept)[1:], "run scripts/docs_figures.py notebook"
    assert any("asked for by policy.override" in text for text in reports)


def test_it_is_committed_with_results(kept: Any) -> None:
    pictures = [o for cell in kept.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(pictures) == len(docs_figures.PICTURES)
    assert "bfloat16" in printed(kept)[0]
    for name in docs_figures.PICTURES:
        assert (docs_figures.GALLERY / f"{name}.png").stat().st_size > 5000
