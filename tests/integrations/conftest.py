"""The fixture that records what a test found about a framework, for the table of docs/frameworks.md."""

from __future__ import annotations

import json
from collections.abc import Callable

import framework_table
import pytest


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Call with framework, precision and cells of the table by column; fails if the page says something else."""

    def note(framework: str, precision: str, cells: dict[str, object]) -> None:
        facts = {name: str(value) for name, value in cells.items()}
        names = {"framework": framework, "precision": precision}
        record_property(framework_table.PROPERTY, json.dumps({**names, **facts}))
        row = framework_table.rows(framework_table.PAGE.read_text("utf-8")).get((framework, precision), {})
        assert {name: row.get(name) for name in facts} == facts, "run scripts/framework_table.py"

    return note
