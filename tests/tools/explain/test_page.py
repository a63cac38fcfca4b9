"""Pages that are whole, escaped and without a script, and tables that fit a terminal."""

from __future__ import annotations

import re
import sys
from importlib import resources

import pages
import pytest

from xla_amp.common import units
from xla_amp.common.tables import Table
from xla_amp.errors import FileError, MissingLibraryError
from xla_amp.tools.explain.page import Page, Section, curve

EVIL = "</details><script>alert(1)</script><b>&amp;\u2028'\""
LONG = "/very/long" * 9 + "/model.py:7"


def table(**fields) -> Table:
    known = {
        "columns": ("operation", "count", "module", "rule", "where", "bytes", "why"),
        "rows": [("scaled_dot_product_attention", 12, "decoder.layers.0-11.attention", "r" * 50, LONG, "1.5 MiB", "w")],
        "right": ("bytes",),
        "optional": ("bytes", "rule"),
        "more": ("why",),
    }
    return Table(**{**known, **fields})


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("draws", [False, True], ids=["plain", "rich"])
def test_a_table_fits_the_terminal_and_keeps_the_line(width, draws, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: draws, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in table().text().splitlines()]
    assert max(map(len, lines)) <= width
    assert any("…" in line and "/model.py:7" in line for line in lines)
    assert ("┃" in lines[1]) == draws
    assert not any("why" in line for line in lines)


def test_a_wide_terminal_has_every_column_in_full():
    head, _, row = table().text(400).splitlines()
    assert head.split() == ["operation", "count", "module", "rule", "where", "bytes"]
    assert row.split() == [*map(str, table().rows[0][:5]), "1.5", "MiB"]


def test_numbers_stand_right_empty_columns_and_rows_without_end_are_left_out():
    shown = Table(columns=("a", "b", "c"), rows=[(i * 1000, None, f"{i}\x1b\n") for i in range(60)], note="n").text(80)
    assert shown.splitlines()[:4] == ["     a  c", "------  ------", "     0  0\\x1b", " 1,000  1\\x1b"]
    assert shown.splitlines()[-2:] == ["and 20 more rows", "n"]
    with pytest.raises(ValueError, match="a table of 1 columns, and a row of 2 cells"):
        Table(columns=("a",), rows=[(1, 2)])


def test_without_rich_a_terminal_gets_plain_text(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert table().text(80).startswith("operation ")


def test_a_page_shows_what_the_text_does_not():
    page = Page(
        "a program",
        {"policy": "tpu"},
        [
            Section("What?", "that", "could", [("linear", "in h.0")]),
            Section("empty"),
            Section("loss", svg=curve([1, 2, 3], [1.0, float("nan"), None], "loss")),
            Section("Operations", table=table(risks=(0,))),
            Section("Integers", table=table(), folded=True),
        ],
    )
    assert page.text(400) == (
        "a program\n\npolicy  tpu\n\nWhat?\n  that\n  - linear: in h.0\n\nOperations\n" + table().text(400)
    )
    read = pages.read(page.html())
    (row,) = read.tables["Operations"]
    assert row == {"state": "risk", **{n: str(c) for n, c in zip(table().columns, table().rows[0], strict=True)}}
    assert "empty" not in read.words
    sections = [known for tag, known in read.elements if tag == "details" and "class" in known]
    assert [(known["class"], "open" in known) for known in sections] == [
        ("could", True), ("", True), ("", True), ("", False)
    ]  # fmt: skip
    assert [known for tag, known in read.elements if tag == "path"] == [{"class": "bad", "d": "M150.0,0V80"}]


def test_every_text_is_escaped():
    evil = Table(columns=(EVIL,), rows=[(EVIL,)], note=EVIL)
    page = Page(EVIL, {EVIL: EVIL}, [Section(EVIL, EVIL, "risk", [(EVIL, EVIL)], evil, curve([1], [1.0], EVIL))])
    read = pages.read(page.html())
    assert "b" not in [tag for tag, _ in read.elements]
    assert evil._repr_html_().count("<") == 2 * 5


def test_a_page_needs_jinja2_and_a_folder(monkeypatch, tmp_path):
    with pytest.raises(FileError, match=r"no/page\.html: No such file"):
        Page("a").write(tmp_path / "no" / "page.html")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'xla-amp\[cli\]'"):
        Page("a").write(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def _contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours ``#rrggbb``."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_template_is_small_and_its_colours_have_contrast_in_light_and_dark():
    template = resources.files("xla_amp.tools.explain").joinpath("page.html.j2").read_text()
    assert len(template.splitlines()) <= 120
    schemes = re.findall(r":root \{(.*?)\}", template, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colour = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for back in ("back", "raised"):
            assert _contrast(colour["ink"], colour[back]) >= 7
            assert all(_contrast(colour[each], colour[back]) >= 4.5 for each in ("soft", "low", "could", "risk"))


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (None, "unknown")]
)
def test_sizes(number, text):
    assert units.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (8.9e-6, "8.9 us"), (5e-9, "5 ns"), (None, "unknown")]
)
def test_times(seconds, text):
    assert units.time(seconds) == text
