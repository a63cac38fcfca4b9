"""Pages and tables that fit a terminal, and the answers about operations."""

from __future__ import annotations

import pytest

from xla_amp.common.events import DecisionRecord
from xla_amp.common.tables import Table
from xla_amp.pages import operations
from xla_amp.pages.operations import Operation
from xla_amp.pages.page import Page, Section

LONG = "/very/long" * 9 + "/model.py:7"


def table(**fields) -> Table:
    known = {
        "columns": ("operation", "count", "module", "rule", "where", "bytes"),
        "rows": [("scaled_dot_product_attention", 12, "decoder.layers.0-11.attention", "r" * 50, LONG, "1.5 MiB")],
        "right": ("bytes",),
        "optional": ("bytes", "rule"),
    }
    return Table(**{**known, **fields})


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_fits_the_terminal_and_keeps_the_line(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = table().text().splitlines()
    assert max(map(len, lines)) <= width
    assert any("…" in line and "/model.py:7" in line for line in lines)


def test_rich_breaks_no_word_of_a_rule_in_eighty_columns(monkeypatch):
    """A conversion has no column `where`, so its rules have the place; they are wrapped, or the column is left out."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    low = {"origin": "tables/tpu.toml:12 (rule 1)", "module": "", "bytes": 2048}
    asked = {**low, "layer": "context", "origin": "autocast(rules=...), 'tanh'", "operation": "tanh"}
    shown = operations.table([operation(**low), operation(**asked)]).table.text(80)
    assert max(map(len, shown.splitlines())) <= 80
    for part in ("tables/tpu.toml:12", "(rule 1)", "autocast(rules=...),", "'tanh'"):
        assert part in shown
    long = {"operation": "scaled_dot_product_attention", "given": ("bfloat16", "float32"), "location": "train.py:5"}
    shown = operations.table([operation(**long, module="h.0.at")]).table.text(80)
    assert max(map(len, shown.splitlines())) <= 80
    for part in ("scaled_dot_product_attention", "h.0.at", "train.py:5"):
        assert part in shown


def test_a_page_leaves_out_what_is_empty():
    sections = Section("What?", "that", [("linear", "in h.0")]), Section("empty"), Section("Operations", table=table())
    page = Page("a program", {"policy": "tpu"}, sections)
    assert page.text(400) == (
        "a program\n\npolicy  tpu\n\nWhat?\n  that\n  - linear: in h.0\n\nOperations\n" + table().text(400)
    )


def operation(**fields) -> Operation:
    row = {name: fields.pop(name) for name in ("verdict", "product") if name in fields}
    known = {"operation": "linear", "module": "h.0", "given": ("float32",), "used": ("bfloat16",), "flops": 100}
    known |= {"result": ("bfloat16",), "cast": "low", "layer": "builtin", "policy": "tpu", "front": "pytorch"}
    return Operation(record=DecisionRecord(**{**known, **fields}), **{"product": True, "verdict": "low", **row})


def test_equal_operations_of_numbered_layers_are_one_row_with_sums_without_integers():
    found = [operation(module=f"h.{i}", flops=flops) for i, flops in ((0, None), (1, 100), (3, 300))]
    found += [operation(module="h.2", verdict="risk", why="a"), operation(module="h.5", verdict="risk", why="b")]
    found += [operation(operation="exp", why=why, product=False) for why in "abcde"]
    found += [operation(operation="view", verdict="plumbing")]
    page = Page("a program", sections=[operations.table(found)])
    rows = page.sections[0].table.shown()
    low, risk, exp = (dict(zip(rows[0], row, strict=True)) for row in rows[1])
    assert (low["count"], low["module"], low["FLOP"]) == ("3", "h.0-1,3", "400 FLOP")
    assert (low["before"], low["after"], low["result"]) == ("f32", "bf16", "bf16")
    assert (risk["module"], risk["FLOP"], exp["count"], len(rows[1])) == ("h.2,5", "200 FLOP", "5", 3)
    assert operations.findings(found)[1].items == (("2 x linear", "in h.2,5, 200 FLOP, a; b"),)
    assert page.text().endswith("\nwithout 1 row of integers and plumbing")


def test_answers_name_the_most_expensive_first():
    found = [operation(verdict="could", module=f"h.{i}", flops=10, why="a rule") for i in range(12)]
    found += [operation(operation="conv2d", verdict="could", flops=10**6), operation(flops=80)]
    could, risk = operations.findings(found)
    assert could.text == "13 of 14 products and convolutions, 1 MFLOP of 1 MFLOP (100 %)"
    assert could.items == (("conv2d", "in h.0, 1 MFLOP"), ("12 x linear", "in h.0-11, 120 FLOP, a rule"))
    assert risk.text == "nothing that the rules know"


def test_float32_on_purpose_has_its_reasons_and_is_not_what_could_be_low():
    wide = {"verdict": "wide", "product": False, "flops": None, "used": ("float32",)}
    found = [operation(operation="layer_norm", why="Variances cancel.", **wide) for _ in range(3)]
    found += [operation(operation="rms_norm", why="Variances cancel.", **wide), operation(operation="exp", **wide)]
    could, _, on_purpose, follows = operations.findings(found)
    assert (could.text, could.items) == ("nothing: no products", ())
    assert on_purpose.text == "4 operations"
    assert on_purpose.items == (("4 x layer_norm, rms_norm", "Variances cancel."),)
    assert (follows.title, follows.items) == ("What is float32 because an operand is?", (("1 x exp", ""),))
    found = [operation(why=str(number), **wide) for number in range(7)]
    assert operations.findings(found, most=5)[2].items[-1] == ("and 2 more reasons", "")
