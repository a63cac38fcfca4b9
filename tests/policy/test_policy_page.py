"""docs/policy.md: what it shows is what happens."""

from __future__ import annotations

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
