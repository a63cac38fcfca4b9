"""The one design of all reports: pages that are whole, escaped and readable, and tables that fit a terminal."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import resources

import pytest
import report_pages

from xla_amp.common.events import DecisionRecord
from xla_amp.errors import FileError, MissingLibraryError
from xla_amp.report import operations, page, paths, terminal
from xla_amp.report.document import STATES, Column, Document, Edge, Finding, Row, Table
from xla_amp.report.operations import Operation

EVIL = "</script><script>alert(1)</script><b>&amp;\u2028'\""


def operation(**fields) -> Operation:
    row = {name: fields.pop(name) for name in ("state", "product", "casts", "error") if name in fields}
    known = {"operation": "linear", "module": "h.0", "given": ("float32",), "used": ("bfloat16",), "flops": 100}
    known |= {"result": ("bfloat16",), "cast": "low", "layer": "builtin", "policy": "tpu", "front": "pytorch"}
    return Operation(record=DecisionRecord(**{**known, **fields}), **{"product": True, "state": "low", **row})


def document(found: list[Operation], **fields) -> Document:
    known = {"title": "a program", "kind": "explain", "findings": operations.findings(found)}
    return Document(**{**known, "tables": (operations.table(found),), **fields})


def test_a_page_is_whole_and_has_the_rows():
    found = [operation(), operation(), operation(module="h.1", state="could", location="/a/model.py:3")]
    read = report_pages.read(page.html(document(found, facts=(("policy", "tpu"),))))
    assert [(row["module"], row["count"], row["FLOP"], row["state"]) for row in read.rows("Operations")] == [
        ("h.0", 2, 200, "low"),
        ("h.1", 1, 100, "could"),
    ]
    assert {"policy", "tpu", "a program", "What runs in float32 that could be low?"} <= set(read.words)
    assert "1 of 3 products and convolutions, 100 FLOP of 300 FLOP (33.3 %)" in read.words


def test_every_text_is_escaped():
    table = Table(
        title=EVIL, columns=(Column(EVIL, meaning=EVIL), Column("at", "place")), rows=(Row((EVIL, EVIL)),), note=EVIL
    )
    finding = Finding(EVIL, EVIL, "risk", ((EVIL, EVIL),))
    all_evil = Document(
        title=EVIL, kind=EVIL, facts=((EVIL, EVIL),), findings=(finding,), tables=(table,),
        edges=(Edge(EVIL, EVIL, EVIL, 1, 1),),
    )  # fmt: skip
    text = page.html(all_evil)
    read = report_pages.read(text)
    assert "b" not in [tag for tag, _ in read.elements]
    assert text.count("</script>") == 2
    assert read.rows(EVIL)[0][EVIL] == EVIL


def test_numbers_that_json_lacks():
    rows = (Row((float("inf"), [1.0, float("nan"), None])), Row((None, None)))
    table = Table(title="t", columns=(Column("error", "error"), Column("amax", "series")), rows=rows, steps=(1, 2, 3))
    read = report_pages.read(page.html(Document(title="", kind="monitor", tables=(table,))))
    assert [row["error"] for row in read.rows("t")] == ["inf", None]
    assert read.rows("t")[0]["amax"] == [1.0, "nan", None]
    assert read.data["tables"][0]["steps"] == [1, 2, 3]


def test_ten_thousand_operations_are_small_and_not_drawn_at_once():
    """Time to open is that of parsing: the page has few elements, and each text once."""
    found = [
        operation(
            operation=f"op{i % 40}",
            module=f"transformer.h.{i // 200}.mlp",
            location=f"/home/me/model.py:{i}",
            why="w" * 80,
            state="same",
        )
        for i in range(10_000)
    ]
    text = page.html(document(found))
    read = report_pages.read(text)
    assert len(read.rows("Operations")) == 10_000
    assert len(read.elements) < 60, "rows are drawn by the script when they are in sight"
    assert text.count("w" * 80) == 1
    assert len(text) < 1_000_000


def test_a_page_needs_jinja2_and_a_folder(monkeypatch, tmp_path):
    with pytest.raises(FileError, match=r"no/page\.html: No such file"):
        page.write(document([operation()]), tmp_path / "no" / "page.html")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'xla-amp\[cli\]'"):
        page.write(document([operation()]), tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def _contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours ``#rrggbb``."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_and_marks_have_contrast_in_light_and_dark():
    style = resources.files("xla_amp.report").joinpath("templates", "page.css").read_text()
    schemes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colour = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for back in ("back", "raised", "chosen"):
            assert _contrast(colour["ink"], colour[back]) >= 7
            assert _contrast(colour["soft"], colour[back]) >= 4.5
        for mark in ("low", "could", "wide", "risk", "cast", "focus"):
            assert _contrast(colour[mark], colour["back"]) >= 3


def test_what_the_keyboard_and_a_screen_reader_need():
    script = resources.files("xla_amp.report").joinpath("templates", "page.js").read_text()
    for needed in (
        "aria-sort",
        "aria-expanded",
        "aria-level",
        "aria-rowcount",
        "aria-rowindex",
        "treegrid",
        "ArrowDown",
    ):
        assert needed in script
    assert "innerHTML" not in script, "texts are set as text"
    style = resources.files("xla_amp.report").joinpath("templates", "page.css").read_text()
    assert all(each in style for each in (":focus-visible", "prefers-color-scheme: dark", "prefers-reduced-motion"))


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_rows_fill_the_table_before_anybody_scrolls(tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page.html(document([operation(module=f"h.{n}") for n in range(200)])))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=500,900"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert 900 * 0.72 / 30 < shown.count("<tr data-at") < 100  # rows of 30 pixels in a table of 72 % of the window


@pytest.mark.parametrize("width", [80, 100, 120])
def test_text_fits_the_terminal(width):
    found = [
        operation(
            operation="scaled_dot_product_attention", module=f"model.decoder.layers.{i}.self_attention",
            location="/very/long" * 9 + "/model.py:7", why="a reason that is long " * 8,
            origin="autocast(rules=...), 'module:model.decoder.*'", cast="low", layer="override",
            state="could", bytes=10**8, flops=10**9,
        )
        for i in (0, 1, 2, 7)
    ]  # fmt: skip
    shown = terminal.text(document(found, title="t", facts=(("fact", "value " * 40),)), width)
    table = shown.partition("Operations:\n")[2].splitlines()
    assert max(map(len, table)) <= width
    assert all(len(line) <= width or "/very/long" in line for line in shown.splitlines())
    assert table[2].split()[0] == "4", "equal operations of numbered layers are one line"
    assert len(table) == 3


def test_the_terminal_leaves_out_plumbing_and_says_so():
    found = [operation(), operation(operation="view", state="plumbing")]
    shown = terminal.text(document(found), 80)
    assert "view" not in shown
    assert shown.endswith("1 row of integers and plumbing is left out")


def test_a_table_sums_what_it_joins():
    found = [operation(module="h.0", flops=None), operation(module="h.1"), operation(module="h.3")]
    columns, lines, _ = terminal.lines(operations.table(found))
    assert dict(zip([column.name for column in columns], lines[0], strict=True)) == {
        "count": "3", "operation": "linear", "module": "h.0-1,3", "before": "f32", "after": "bf16", "result": "bf16",
        "FLOP": "200 FLOP",
    }  # fmt: skip


def test_layers_that_differ_in_two_numbers():
    assert paths.together(["a.0.b.1", "a.0.b.2"]) == "a.0.b.1-2"
    assert paths.together(["a.0.b.1", "a.1.b.2"]) == "a.*.b.*"
    assert paths.pattern("layer10.0") == "layer10.*"


def test_sparklines():
    assert terminal.sparkline([]) == ""
    assert terminal.sparkline([1.0, 1.0]) == "▁▁"
    assert terminal.sparkline([None, 0.0, 7.0, float("nan")]) == " ▁█!"
    assert len(terminal.sparkline([float(i) for i in range(1000)])) <= 16


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"floating": False}, "plumbing"),
        ({"cast": True, "low": True}, "cast"),
        ({"low": True, "product": True}, "low"),
        ({"low": True, "risky": True}, "risk"),
        ({"product": True, "ruled": True}, "could"),
        ({"ruled": True}, "wide"),
        ({}, "same"),
    ],
)
def test_states(fields, state):
    known = dict.fromkeys(("cast", "low", "product", "ruled", "risky"), False)
    assert operations.state(**{"floating": True, **known, **fields}) == state
    assert state in STATES


def test_rows_have_the_cells_of_the_columns():
    with pytest.raises(ValueError, match="t: 1 columns, and a row of 2 cells"):
        Table(title="t", columns=(Column("a"),), rows=(Row((1, 2)),))


def test_findings_name_the_most_expensive_first():
    found = [operation(state="could", module=f"h.{i}", flops=10, why="a rule") for i in range(12)]
    found += [operation(operation="conv2d", state="could", flops=10**6)]
    first, second, *_ = operations.findings(found)[0].items
    assert first == ("conv2d", "in h.0, 1 MFLOP")
    assert second == ("12 x linear", "in h.0-11, 120 FLOP, a rule")


def test_float32_on_purpose_has_its_reasons_and_is_not_what_could_be_low():
    norm, loss = ({"state": "wide", "product": False, "flops": None, "used": ("float32",)} for _ in range(2))
    found = [operation(operation="layer_norm", why="Variances cancel.", **norm) for _ in range(3)]
    found += [operation(operation="rms_norm", why="Variances cancel.", **norm), operation(operation="exp", **loss)]
    could, _, on_purpose = operations.findings(found)
    assert (could.answer, could.items) == ("nothing: no products", ())
    assert on_purpose.answer == "5 operations"
    assert on_purpose.items == (("4 x layer_norm, rms_norm", "Variances cancel."), ("1 x exp", "an operand is float32"))
    assert len(operations.findings([operation()])) == 2, "no operation is float32 on purpose"


def test_the_reasons_that_are_left_out_are_counted():
    found = [operation(state="wide", product=False, why=str(number)) for number in range(7)]
    assert operations.findings(found, most=5)[2].items[-1] == ("and 2 more reasons", "")
