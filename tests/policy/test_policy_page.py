"""docs/policy.md, and the page of one file on four fronts: what they show is what happens."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from xla_amp.common.types import CASTS
from xla_amp.errors import PolicyError
from xla_amp.policy import BUILTIN, load

PAGE = (Path(__file__).parents[2] / "docs" / "policy.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)

CHANGES = [('"softmax"', '"sofmax"'), ('cast = "fp32"', 'cast = "float32"'), ("mylib::attention", "softmax")]


def test_the_example_file_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(EXAMPLE)
    policy = load("mine.toml")
    assert policy.name == "mine"
    assert policy.decide("linalg_norm").cast == "fp32"
    assert policy.decide("mylib::attention").cast == "low"


@pytest.mark.parametrize("number", range(3))
def test_the_error_messages_are_those_shown(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    shown = [line for line in PAGE.splitlines() if line.startswith("mine.toml:")][number]
    Path("mine.toml").write_text(EXAMPLE.replace(*CHANGES[number]))
    with pytest.raises(PolicyError) as caught:
        load("mine.toml")
    assert str(caught.value).startswith(shown.partition("...")[0])


def test_the_tables_of_the_page_are_complete():
    first_columns = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    policies = "tpu gpu cuda xpu mps cpu hpu cautious lean"
    assert first_columns == [*CASTS, *policies.split()]
    assert set(first_columns[len(CASTS) :]) == set(BUILTIN)


# One file with rules for operations, modules and functions in parts: `tests/helpers/one_rule.py` and its page.

SCRIPT = Path(__file__).parents[1] / "helpers" / "one_rule.py"


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("flax")
    spec = importlib.util.spec_from_file_location("one_rule", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(script):
    return script.tables()


def test_the_four_forms_have_the_same_casts(script, found):
    placed = {name: [(script.place(row.module), *row[1:]) for row in rows] for name, rows in found.items()}
    first = placed["PyTorch"]
    assert len(first) == 9 * script.LAYERS + 2
    for name, rows in placed.items():
        assert sorted(rows) == sorted(first), name


def test_each_kind_of_rule_acts(found):
    decided = {(row.operation, row.dtype) for row in found["PyTorch"] if row.layer != "builtin"}
    assert decided == {("bmm", "float32"), ("layer_norm", "bfloat16"), ("silu", "float32"), ("linear", "float32")}


def test_the_page_is_up_to_date(script, found):
    assert script.PAGE.read_text() == script.page(found), "run: python tests/helpers/one_rule.py --write"
