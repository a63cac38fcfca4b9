"""A history as a report: advice, the course of each layer's statistics, and of loss, scale and gradient norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xla_amp.report.document import Cell, Column, Curve, Document, Finding, Row, State, Table
from xla_amp.tools.monitor.advice import THRESHOLDS, Advice, advice
from xla_amp.tools.monitor.history import History, Statistics, StepRecord, ValueKey

_COURSES = ("loss", "gradient_norm", "loss_scale")
"""Numbers of a step that the page begins with, over the steps."""
_MOST = 8
"""Pieces of advice that the report begins with."""


def document(history: History) -> Document:
    """The report for people: `xla_amp.report` writes it as a page or as text."""
    steps = history.steps
    if not steps:
        return Document(title="no step has been read yet", kind="monitor")
    found = advice(history)
    skipped = sum(record.skipped for record in steps)
    facts = [("steps", f"{steps[0].step:,} to {steps[-1].step:,}"), ("low dtype", history.low)]
    facts += [("skipped steps", f"{skipped:,}")] if skipped else []
    return Document(
        title=_headline(steps[-1]),
        kind="monitor",
        state="risk" if _failed(steps[-1]) else "",
        facts=tuple(facts),
        curves=_curves(steps),
        findings=(_advice(found), *_headroom(history)),
        tables=(_layers(history, found), _steps(history)),
    )


def _headline(record: StepRecord) -> str:
    """One line about a step."""
    parts = [f"step {record.step:,}"]
    if record.loss is not None:
        parts.append(f"loss {record.loss:.5g}")
    if record.loss_scale is not None:
        parts.append(f"loss scale {record.loss_scale:g}")
    if record.gradient_norm is not None:
        parts.append(f"gradient norm {record.gradient_norm:.4g}")
    return ", ".join(parts) + (", skipped" if record.skipped else "")


def _failed(record: StepRecord) -> bool:
    """Whether a step was skipped, or its loss or gradient norm is not finite."""
    numbers = (record.loss, record.gradient_norm)
    return record.skipped or not all(math.isfinite(each) for each in numbers if each is not None)


def _curves(steps: Sequence[StepRecord]) -> tuple[Curve, ...]:
    numbers = tuple(record.step for record in steps)
    found = {name: tuple(getattr(record, name) for record in steps) for name in _COURSES}
    known = {name: values for name, values in found.items() if any(value is not None for value in values)}
    return tuple(Curve(name.replace("_", " "), numbers, values) for name, values in known.items())


def _advice(found: Sequence[Advice]) -> Finding:
    question = "What may want a change?"
    if not found:
        return Finding(question, "nothing that the history tells", "low")
    alike: dict[tuple[str, str, int | None], list[Advice]] = {}
    for each in found:  # an inf spreads: one line for all layers of one kind that it reached in one step
        alike.setdefault((each.rule, each.key.kind if each.key else "", each.since), []).append(each)
    items = [
        (
            first.text + (f", and {len(others)} more layer{'s' if len(others) > 1 else ''}" if others else ""),
            THRESHOLDS[first.rule].why if first.rule in THRESHOLDS else "",
        )
        for first, *others in alike.values()
    ]
    more = [(f"and {len(items) - _MOST} more", "")] if len(items) > _MOST else []
    return Finding(question, f"{len(found)} thing{'' if len(found) == 1 else 's'}", "risk", (*items[:_MOST], *more))


def _headroom(history: History) -> list[Finding]:
    last = next((record for record in reversed(history.steps) if record.statistics), None)
    if last is None:
        return []
    nearest = sorted(last.statistics.items(), key=lambda item: item[1].headroom)[:5]
    items = tuple((f"{row.headroom:.1f}", f"{key.kind}s of {key.layer or 'the model'}") for key, row in nearest)
    answer = f"exponents of headroom in {history.low}, step {last.step:,}"
    return [Finding("What is nearest to an overflow?", answer, "wide", items)]


def _layers(history: History, found: Sequence[Advice]) -> Table:
    """One row for each layer and kind, with its course over the sampled steps."""
    sampled = [record for record in history.steps if record.statistics]
    about = {each.key: each.text for each in reversed(found) if each.key is not None}
    columns = (
        Column("kind"),
        Column("layer", "scope"),
        Column("headroom", "count", least=True, meaning=f"Exponents left in {history.low}, newest sampled step"),
        Column("headroom over steps", "series", meaning=f"Exponents left in {history.low}"),
        Column("amax", "count", meaning="Largest finite magnitude, newest sampled step"),
        Column("amax over steps", "series"),
        Column("underflow", "share", meaning="Share of values, not zero, that the low dtype rounds to zero"),
        Column("underflow over steps", "series"),
        Column("rms", "count"),
        Column("inf", "share"),
        Column("NaN", "share"),
        Column("update ratio", "error", meaning="rms of the update divided by rms of the weight"),
        Column("advice", detail=True),
    )
    rows = []
    for key in history.layers():
        course = [record.statistics.get(key) for record in sampled]
        newest = next(row for row in reversed(course) if row is not None)
        rows.append(Row(_cells(key, newest, course, about.get(key, "")), _state(course, key in about)))
    return Table(
        title="Layers",
        columns=columns,
        rows=tuple(rows),
        steps=tuple(record.step for record in sampled),
    ).without_empty_columns()


def _cells(key: ValueKey, newest: Statistics, course: Sequence[Statistics | None], words: str) -> tuple[Cell, ...]:
    def over(name: str) -> list[float | None]:
        return [None if row is None else _shown(row, name) for row in course]

    headroom = None if newest.headroom == float("inf") else newest.headroom  # all zero
    return (
        key.kind, key.layer, headroom, over("headroom"), newest.amax, over("amax"), newest.underflow,
        over("underflow"), newest.rms, newest.inf or None, newest.nan or None, newest.update_ratio, words,
    )  # fmt: skip


def _shown(row: Statistics, name: str) -> float | None:
    """A statistic; NaN where values are not finite, not that of the finite ones; nothing is near if all are zero."""
    if not row.finite:
        return float("nan")
    value: float = getattr(row, name)
    return None if name == "headroom" and value == float("inf") else value


def _state(course: Sequence[Statistics | None], advised: bool) -> State:
    return "risk" if advised or any(row is not None and not row.finite for row in course) else ""


def _steps(history: History) -> Table:
    """Loss, loss scale and gradient norm over the steps."""
    columns = (
        Column("of the run"),
        Column("over steps", "series"),
        Column("first", "count"),
        Column("last", "count"),
        Column("smallest", "count"),
        Column("largest", "count"),
        Column("not finite", "count"),
    )
    rows = []
    for name in _COURSES:
        course = [getattr(record, name) for record in history.steps]
        known = [value for value in course if value is not None]
        finite = [value for value in known if value - value == 0]
        if known:
            ends = min(finite, default=None), max(finite, default=None)
            rows.append(Row((name.replace("_", " "), course, known[0], known[-1], *ends, len(known) - len(finite))))
    skipped = [float(record.skipped) for record in history.steps]
    if any(skipped):
        rows.append(Row(("skipped", skipped, skipped[0], skipped[-1], min(skipped), max(skipped), 0)))
    return Table(title="Run", columns=columns, rows=tuple(rows), steps=tuple(record.step for record in history.steps))
