"""Records of steps: what is bad, the report, and the numbers by name."""

from __future__ import annotations

import dataclasses
import math
import re
import sys

import pytest

from xla_amp.common.tables import Table
from xla_amp.errors import MissingLibraryError
from xla_amp.pages.page import Page, Section
from xla_amp.tools.monitor.history import History, StepRecord, is_bad

GOOD = StepRecord(step=1, loss=1.0, loss_scale=2.0, gradient_norm=1.0)


@pytest.mark.parametrize(
    ("changes", "bad"),
    [
        ({}, False),
        ({"loss": None}, False),
        ({"loss": math.nan}, True),
        ({"loss": math.inf, "loss_scale": 4.0, "skipped": True}, True),  # a larger scale does not change the loss
        ({"skipped": True}, True),
        ({"loss_scale": 4.0, "skipped": True}, False),  # a try of a larger scale
        ({"loss_scale": None, "skipped": True}, True),
        ({"gradient_norm": math.inf}, False),  # the scaler decides
        ({"gradient_norm": math.inf, "loss_scale": None}, True),
    ],
)
def test_which_step_is_bad(changes, bad):
    assert is_bad(GOOD, dataclasses.replace(GOOD, step=2, **changes)) == bad


def test_a_first_step_is_bad_by_its_loss_and_not_by_a_search_for_the_scale():
    first = dataclasses.replace(GOOD, skipped=True)
    assert not is_bad(None, first)
    assert is_bad(None, dataclasses.replace(first, loss=math.inf))


@pytest.fixture
def history() -> History:
    steps = [
        StepRecord(step=step, loss=1.0 / step, loss_scale=2.0**16, gradient_norm=0.5, largest={"h.0": step, "": 1.0})
        for step in range(100, 110)
    ]
    bad = {"loss": math.inf, "skipped": True, "bad": True, "nonfinite": ("h.0.w", "h.0.b", "a", "b")}
    steps[8] = dataclasses.replace(steps[8], largest={"h.0": math.inf}, **bad)
    return History(steps)


def test_the_report_names_bad_steps_and_layers(history):
    text = str(history)
    assert text.startswith("step 109, loss 0.0091743, gradient norm 0.5, loss scale 65536\n")
    assert (
        "Which steps were bad?\n  1 of 10\n  - step 108: the loss is inf; the first layer with an inf or NaN is h.0; "
        in text
    )
    assert "not finite are the gradients of h.0.w, h.0.b, a, ... (4 parameters)" in " ".join(text.split())
    assert history.page().sections[-1].table.rows == [("h.0", 109, 109), ("the model", 1.0, 1.0)]
    assert str(History([])) == "no step has been read yet"


def test_the_plot_has_bad_steps_in_red(history, tmp_path, monkeypatch):
    figure = history.plot()
    figure.savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "gradient norm", "loss scale"]
    for axes in figure.axes:
        course, bad = axes.lines
        assert list(course.get_xdata()) == list(range(100, 110))
        assert (list(bad.get_xdata()), bad.get_color()) == ([108, 108], "red")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingLibraryError, match="pip install matplotlib"):
        history.plot()


def test_a_notebook_shows_tables(history, monkeypatch):
    shown = history._repr_html_()
    assert shown.startswith("<b>step 109, loss 0.0091743, ")
    assert "steps: 100 to 109<br>skipped steps: 1<br>" in shown
    cells = [re.findall("<td>(.*?)</td>", row) for row in shown.partition("<tbody>")[2].split("</tr>")]
    assert [row for row in cells if row] == [["h.0", "109", "109"], ["the model", "1", "1"]]
    escaped = Page("<a>", sections=[Section("", table=Table(columns=("<b>",), rows=[("<c>",)]))]).html()
    assert "<a>" not in escaped
    assert "<c>" not in escaped
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert history._repr_html_() is None, "IPython shows the text then"


def test_scalars_by_name(history):
    expected = {"loss": math.inf, "gradient_norm": 0.5, "loss_scale": 65536.0, "skipped": 1.0}
    assert history.steps[8].scalars() == expected | {"nonfinite_parameters": 4.0, "largest/h.0": math.inf}
    assert "largest/model" in history.steps[0].scalars()
    assert set(StepRecord(step=0).scalars()) == {"skipped", "nonfinite_parameters"}
