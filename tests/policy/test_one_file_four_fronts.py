"""One file with rules for operations, modules and functions in parts: `tests/helpers/one_rule.py` and its page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers" / "one_rule.py"


@pytest.fixture(scope="module")
def script() -> Any:
    pytest.importorskip("flax")
    spec = importlib.util.spec_from_file_location("one_rule", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(script: Any) -> Any:
    return script.tables()


def test_the_four_forms_have_the_same_casts(script: Any, found: Any) -> None:
    placed = {name: [(script.place(row.module), *row[1:]) for row in rows] for name, rows in found.items()}
    first = placed["PyTorch"]
    assert len(first) == 9 * script.LAYERS + 2
    for name, rows in placed.items():
        assert sorted(rows) == sorted(first), name


def test_each_kind_of_rule_acts(found: Any) -> None:
    decided = {(row.operation, row.dtype) for row in found["PyTorch"] if row.layer != "builtin"}
    assert decided == {("bmm", "float32"), ("layer_norm", "bfloat16"), ("silu", "float32"), ("linear", "float32")}


def test_the_page_is_up_to_date(script: Any, found: Any) -> None:
    assert script.PAGE.read_text() == script.page(found), "run: python tests/helpers/one_rule.py --write"
