"""What a monitor promises on every front: numbers, names of what is not finite, the warning, bad steps, the report."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import xla_amp
import xla_amp.jax
from xla_amp.common.tables import Table
from xla_amp.errors import MissingLibraryError
from xla_amp.jax import LossScale, select, statistics, value_and_grad
from xla_amp.pages.page import Page, Section
from xla_amp.tools.monitor.history import History, StepRecord, is_bad

WEIGHTS = {"body": np.full((2, 2), 0.5, np.float32), "head": np.array([[1.0, -2.0]], np.float32)}


def on_torch(captured, sinks, **scale):
    """A monitor, and a monitored step of a batch (rows, 2) with the loss ``mean(head(body(x)) ** 2)``."""
    device = xla_amp.xla_device()
    model = nn.Sequential(collections.OrderedDict(body=nn.Linear(2, 2, bias=False), head=nn.Linear(2, 1, bias=False)))
    model.load_state_dict({f"{name}.weight": torch.tensor(value) for name, value in WEIGHTS.items()})
    optimizer = xla_amp.syncfree.SGD(model.to(device).parameters(), lr=0.0)
    scaler = xla_amp.GradScaler(**scale)
    monitor = xla_amp.monitor(model, optimizer, scaler, sinks=sinks)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    step = xla_amp.compile(step, strict=True) if captured else step

    def monitored(x):
        with monitor.step() as running:
            running.loss = step(torch.tensor(x).to(device))

    return monitor, monitored


def on_jax(sinks, **scale):
    """The same in JAX."""
    monitor, state = xla_amp.jax.monitor(sinks=sinks), LossScale.dynamic(**scale)

    @jax.jit
    def step(weights, state, x):
        def loss(weights):
            body = x @ weights["body"]["weight"].T
            head = body @ weights["head"]["weight"].T
            return jnp.mean(head**2), {"body": body, "head": head}

        out = value_and_grad(loss, has_aux=True)(state, weights)
        loss, layers = out.value
        found = statistics(out.grads, loss=loss, loss_scale=state, skipped=~out.finite, layers=layers)
        return select(out.finite, weights, weights), out.loss_scale, found

    def monitored(x):
        nonlocal state
        _, state, found = step({name: {"weight": value} for name, value in WEIGHTS.items()}, state, x)
        monitor.record(found)

    return monitor, monitored


@pytest.fixture(params=["recorded", "captured", "jax"])
def front(request):
    return (
        on_jax
        if request.param == "jax"
        else lambda *given, **scale: on_torch(request.param == "captured", *given, **scale)
    )


def test_numbers_and_what_is_not_finite(front, recwarn):
    seen, order = [], []
    monitor, step = front([seen.append, lambda record: order.append((record.step, len(seen)))], init_scale=64.0)
    x = np.array([[1.0, 3.0], [0.5, -1.0]], np.float32)
    for number in range(5):
        step(np.where(number in (3, 4), np.float32(math.inf), x))
    found = monitor.read()
    assert found.of("step") == list(range(5))
    assert found.of("skipped") == found.of("bad") == [False] * 3 + [True] * 2
    assert found.of("loss_scale") == [64.0] * 4 + [32.0]
    body = x.astype(np.float64) @ WEIGHTS["body"].T
    head = body @ WEIGHTS["head"].T
    gradient = {"head": head.T @ body, "body": WEIGHTS["head"].T @ head.T @ x}  # of the mean of two squares
    good, bad = found.steps[2], found.steps[3]
    assert good.loss == pytest.approx(np.mean(head**2), rel=1e-6)
    assert good.gradient_norm == pytest.approx(math.sqrt(sum((g**2).sum() for g in gradient.values())), rel=1e-6)
    largest = {name: good.largest[name] for name in ("body", "head")}
    assert largest == pytest.approx({"body": np.abs(body).max(), "head": np.abs(head).max()}, rel=1e-6)
    assert (good.nonfinite, bad.nonfinite) == ((), ("body.weight", "head.weight"))
    assert not math.isfinite(bad.largest["body"])
    assert seen == list(found.steps)
    assert order == [(number, number + 1) for number in range(5)], "each in its turn, after the first sink"
    (said,) = [str(each.message) for each in recwarn if "monitor" in str(each.message)]  # one for steps in a row
    assert said.startswith("monitor: step 3 is bad: the loss is nan; the first layer with an inf or NaN is body; ")
    assert "not finite are the gradients of body.weight, head.weight (2 parameters). xla_amp." in said
    assert said.endswith(" finds the operation")


def test_a_search_for_the_scale_is_no_bad_step(front, recwarn):
    limit = 2.0**126
    monitor, step = front([], init_scale=limit, growth_interval=3, max_scale=limit)
    for _ in range(12):
        step(np.ones((2, 2), np.float32) * 8)
    found = monitor.read()
    assert found.of("skipped")[0], "the search at the beginning"
    assert sum(found.of("skipped")[6:]) >= 1, "and a probe after growth"
    assert not any(found.of("bad"))
    assert not [each for each in recwarn if "monitor" in str(each.message)]


def test_a_sink_that_raises_ends_the_run(front):
    monitor, step = front([lambda record: 1 / 0])
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        step(np.ones((2, 2), np.float32))
        monitor.read()


# ---- records of steps: what is bad, the report, and the numbers by name ----------------------------------------------

GOOD = StepRecord(step=1, loss=1.0, loss_scale=2.0, gradient_norm=1.0)


@pytest.mark.parametrize(
    ("before", "changes", "bad"),
    [
        (GOOD, {}, False),
        (GOOD, {"loss": None}, False),
        (GOOD, {"loss": math.nan}, True),
        (GOOD, {"loss": math.inf, "loss_scale": 4.0, "skipped": True}, True),  # a larger scale does not change the loss
        (GOOD, {"skipped": True}, True),
        (GOOD, {"loss_scale": 4.0, "skipped": True}, False),  # a try of a larger scale
        (GOOD, {"loss_scale": None, "skipped": True}, True),
        (GOOD, {"gradient_norm": math.inf}, False),  # the scaler decides
        (GOOD, {"gradient_norm": math.inf, "loss_scale": None}, True),
        (None, {"skipped": True}, False),  # a search for the scale
        (None, {"loss": math.inf, "skipped": True}, True),
    ],
    ids=lambda value: "after a good one" if value is GOOD else str(value),
)
def test_which_step_is_bad(before, changes, bad):
    assert is_bad(before, dataclasses.replace(GOOD, step=2, **changes)) == bad


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
