"""The report of a history: advice, the course of each layer, and the run's numbers, as a page and on a terminal."""

from __future__ import annotations

import math

import pytest
import report_pages

from xla_amp.report import terminal
from xla_amp.report.document import Column, Row, Table
from xla_amp.report.page import html as page_text
from xla_amp.tools.monitor import history_report
from xla_amp.tools.monitor.advice import advice
from xla_amp.tools.monitor.history import History, Statistics, StepRecord, ValueKey

NAMES = ["h.0.attn", "h.1.attn", "head"]


def statistics(headroom: float, *, inf: float = 0.0, underflow: float = 0.0) -> Statistics:
    amax = 65504 / 2**headroom
    return Statistics(amax=amax, rms=amax / 8, underflow=underflow, inf=inf, nan=0.0, headroom=headroom)


@pytest.fixture
def history() -> History:
    steps = []
    for step in range(100, 110):
        rows = {ValueKey(name, "activation"): statistics(9.0 - at) for at, name in enumerate(NAMES)}
        rows[ValueKey("h.1.attn", "gradient")] = statistics(0.5, inf=0.25 if step == 108 else 0.0)
        sampled = rows if step % 2 == 0 else {}
        loss = math.inf if step == 109 else 1.0
        steps.append(StepRecord(step=step, loss=loss, loss_scale=2.0**16, skipped=step == 109, statistics=sampled))
    return History(low="float16", steps=steps)


def test_the_page_has_the_course_of_each_layer(history):
    page = report_pages.read(page_text(history_report.document(history)))
    layers, run = page.data["tables"]
    assert layers["steps"] == [100, 102, 104, 106, 108]
    assert run["steps"] == list(range(100, 110))
    rows = {(row["layer"], row["kind"]): row for row in page.rows("Layers")}
    assert set(rows) == {*((name, "activation") for name in NAMES), ("h.1.attn", "gradient")}
    assert rows["head", "activation"]["headroom over steps"] == [7.0] * 5
    bad = rows["h.1.attn", "gradient"]
    assert bad["headroom over steps"] == [0.5] * 4 + ["nan"], "a step with an inf is not shown as its finite part"
    assert (bad["state"], rows["head", "activation"]["state"]) == ("risk", "")
    assert "not finite in step 108 (25.00% of the values)" in bad["advice"]
    loss = next(row for row in page.rows("Run") if row["of the run"] == "loss")
    assert (loss["over steps"][-1], loss["last"], loss["largest"], loss["not finite"]) == ("inf", "inf", 1.0, 1)
    assert "the loss is not finite since step 109" in page.words


def test_the_terminal_shows_what_is_nearest_to_an_overflow(history):
    shown = terminal.text(history_report.document(history), 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert "\n  - 0.5: gradients of h.1.attn\n" in shown
    assert "▁▁▁▁!" in shown
    columns, lines, total = terminal.lines(history_report.document(history).tables[0], most=2)
    assert total == 4
    at = [column.name for column in columns].index("headroom")
    assert [line[at] for line in lines] == ["7", "0.5"], "the least headroom, in the order of the model"


def test_zeros_are_not_shown_as_infinite():
    zero = Statistics(amax=0.0, rms=0.0, underflow=0.0, inf=0.0, nan=0.0, headroom=math.inf)
    steps = [StepRecord(step=at, statistics={ValueKey("head", "update"): zero}) for at in range(2)]
    table = history_report.document(History(low="float16", steps=steps)).tables[0]
    (row,) = [dict(zip([c.name for c in table.columns], row.cells, strict=True)) for row in table.rows]
    assert "headroom" not in row
    assert row["headroom over steps"] == [None, None]


def test_a_history_without_steps():
    empty = History(low="float32", steps=[])
    assert terminal.text(history_report.document(empty)) == "no step has been read yet"
    finite = History(low="bfloat16", steps=[StepRecord(step=0, loss=1.0)])
    assert "nothing that the history tells" in terminal.text(history_report.document(finite))


def test_monitors_write_the_page(tmp_path):
    import jax
    import jax.numpy as jnp
    import torch

    import xla_amp
    import xla_amp.jax

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    recorder = xla_amp.monitor(model, optimizer, sample=1, directory=tmp_path / "run")
    with recorder.step() as step:
        step.loss = model(torch.full((1, 2), torch.inf)).sum()
        step.loss.backward()
        optimizer.step()
    recorder.read()
    recorder.to_html(tmp_path / "torch.html")
    recorder.close()

    def update(w, x):
        with jax.named_scope("layer"):
            return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    monitored = xla_amp.jax.monitor(update, sample=1)
    monitored(jnp.ones((2, 2)), jnp.ones((1, 2)))
    monitored.read()
    monitored.to_html(tmp_path / "jax.html")
    for name, layer in (("torch", "0"), ("jax", "layer")):
        page = report_pages.read((tmp_path / f"{name}.html").read_text())
        assert layer in {row["layer"] for row in page.rows("Layers")}
        assert (("a", {"href": "run/bad_step_0000000/rank_0"}) in page.elements) == (name == "torch")


def test_the_page_begins_with_curves_and_is_red_after_a_failed_step(history):
    text = page_text(history_report.document(history))
    page = report_pages.read(text)
    labels = [known.get("aria-label") for tag, known in page.elements if tag == "svg"]
    assert labels[:2] == ["loss over steps", "loss scale over steps"]
    assert ("header", {"class": "risk"}) in page.elements
    assert text.count('class="bad"') == 1, "the loss of step 109 is not finite"
    good = History(low="float16", steps=history.steps[:-1])
    assert ("header", {"class": ""}) in report_pages.read(page_text(history_report.document(good))).elements


@pytest.mark.parametrize(
    ("norms", "skipped", "said"),
    [
        ([1.0, math.nan], [False, True], "the gradient norm is nan in step 1"),
        ([1.0, math.inf], [False, False], "the gradient norm is inf in step 1"),
        ([math.inf, math.nan, math.nan], [False, True, True], "the gradient norm is inf in step 0 and in 2 more"),
        ([1.0, math.inf], [False, True], None),
    ],
)
def test_advice_about_gradient_norms(norms, skipped, said):
    steps = [
        StepRecord(step=i, gradient_norm=n, skipped=s) for i, (n, s) in enumerate(zip(norms, skipped, strict=True))
    ]
    found = [each.text for each in advice(History(low="float16", steps=steps)) if each.rule == "gradient_norm"]
    assert found == ([] if said is None else [said])


def test_two_halvings_are_advice():
    scales = [4.0, 4.0, 2.0, 2.0, 1.0]
    steps = [StepRecord(step=i, loss_scale=s, skipped=i in (1, 3)) for i, s in enumerate(scales)]
    assert [each.rule for each in advice(History(low="float16", steps=steps))] == ["halvings"]


def test_paths_that_are_cut_still_differ():
    layers = [f"transformer.blocks.block_{i}.attention.projection_of_the_output" for i in range(3)]
    columns = (Column("layer", "scope"), Column("n", "count"))
    table = Table(title="t", columns=columns, rows=tuple(Row((layer, 1)) for layer in layers))
    _, rows, _ = terminal.lines(table, 40)
    assert len({row[0] for row in rows}) == 3
