"""Advice from a history, in words; the thresholds are data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from xla_amp.tools.monitor.history import History, Statistics, StepRecord, ValueKey


class Threshold(NamedTuple):
    """A bound and why it is that."""

    value: float
    why: str


THRESHOLDS: Final[Mapping[str, Threshold]] = MappingProxyType(
    {
        "headroom": Threshold(
            1.0, "A value that doubles overflows. Attention scores double within some hundred steps."
        ),
        "underflow": Threshold(0.1, "A tenth of the values is lost in the cast: more than rounding does to a mean."),
        "halvings": Threshold(2, "Tries of a larger scale do not count; one batch can overflow by chance."),
        "window": Threshold(500, "Steps in which halvings are counted: a quarter of torch's growth interval."),
        "smallest_scale": Threshold(1.0, "Below 1 the scale pushes gradients towards zero: the loss itself overflows."),
        "largest_update": Threshold(0.1, "An update of a tenth of the weight is no small step: the rate is too high."),
        "smallest_update": Threshold(2.0**-24, "float32 weights round such an update away."),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One sentence, and what it is about."""

    rule: str
    """``loss``, ``gradient_norm``, ``nonfinite``, ``headroom``, ``underflow``, ``halvings``, ``smallest_scale``,
    ``largest_update`` or ``smallest_update``."""
    text: str
    key: ValueKey | None = None
    """The layer and kind; None for the whole run."""
    since: int | None = None
    """The step since which it holds, or in which it happened."""

    def __str__(self) -> str:
        return self.text


def advice(history: History) -> list[Advice]:
    """What the history says that a user may want to change; the most urgent first."""
    found = [*_losses(history), *_norms(history), *_scales(history)]
    for key in history.layers():
        found += _of_layer(history, key)
    return sorted(found, key=lambda each: _URGENCY.index(each.rule))


_URGENCY = (
    "loss",
    "gradient_norm",
    "nonfinite",
    "smallest_scale",
    "halvings",
    "headroom",
    "underflow",
    "largest_update",
    "smallest_update",
)


def _losses(history: History) -> Iterator[Advice]:
    first = next((r.step for r in history.steps if r.loss is not None and r.loss - r.loss != 0), None)
    if first is not None:
        yield Advice(rule="loss", text=f"the loss is not finite since step {first:,}", since=first)


def _norms(history: History) -> Iterator[Advice]:
    """A NaN, or an inf that no skipped step explains."""
    bad = [
        record
        for record in history.steps
        if record.gradient_norm is not None
        and not math.isfinite(record.gradient_norm)
        and (math.isnan(record.gradient_norm) or not record.skipped)
    ]
    if bad:
        times = "" if len(bad) == 1 else f" and in {len(bad) - 1} more"
        text = f"the gradient norm is {bad[0].gradient_norm} in step {bad[0].step:,}{times}"
        yield Advice(rule="gradient_norm", text=text, since=bad[0].step)


def _scales(history: History) -> Iterator[Advice]:
    records = [record for record in history.steps if record.loss_scale is not None]
    window = int(THRESHOLDS["window"].value)
    recent = [record for record in records if record.step > records[-1].step - window]
    halvings = 0
    good: StepRecord | None = None
    for record in recent:
        halvings += record.skipped and not is_probe(good, record)
        good = good if record.skipped else record
    if halvings >= THRESHOLDS["halvings"].value:
        span = recent[-1].step - recent[0].step + 1
        text = f"the loss scale has halved {halvings} times in {span:,} steps"
        yield Advice(rule="halvings", text=text, since=recent[0].step)
    if records and _scale(records[-1]) < THRESHOLDS["smallest_scale"].value:
        step, scale = records[-1].step, _scale(records[-1])
        low = next(record.step for record in records if _scale(record) < THRESHOLDS["smallest_scale"].value)
        text = f"the loss scale is {scale:g} in step {step:,}: the loss overflows {history.low} by itself"
        yield Advice(rule="smallest_scale", text=text, since=low)


def _scale(record: StepRecord) -> float:
    return 1.0 if record.loss_scale is None else record.loss_scale


def is_probe(good: StepRecord | None, record: StepRecord) -> bool:
    """Whether a skipped step only tried a larger scale than fits.

    `good` is the last step before it that was not skipped: its scale was smaller.  None: the run still looks for its
    first scale.
    """
    return record.skipped and (good is None or _scale(record) > _scale(good))


def _of_layer(history: History, key: ValueKey) -> Iterator[Advice]:
    rows = history.of(key)
    plural = key.kind != "activation"
    layer = key.layer or "the model"
    name = f"the {key.kind}s of {layer}" if plural else f"layer {layer}" if key.layer else layer
    first = next((step for step, row in rows if not row.finite), None)
    if first is not None:
        row = next(row for _, row in rows if not row.finite)
        bad = row.inf + row.nan
        text = f"{name} {'are' if plural else 'is'} not finite in step {first:,} ({bad:.2%} of the values)"
        yield Advice(rule="nonfinite", text=text, key=key, since=first)
    if key.kind in ("activation", "weight") and history.low == "float16":
        room = THRESHOLDS["headroom"].value
        since = _since(rows, lambda row: row.headroom < room)
        if since is not None:
            text = (
                f"{name} {'have' if plural else 'has'} {rows[-1][1].headroom:.1f} exponents of headroom in "
                f"{history.low} since step {since:,}"
            )
            yield Advice(rule="headroom", text=text, key=key, since=since)
    if key.kind in ("activation", "gradient"):
        share = THRESHOLDS["underflow"].value
        since = _since(rows, lambda row: row.underflow >= share)
        if since is not None:
            lost = rows[-1][1].underflow
            text = f"{lost:.0%} of the {key.kind}s of {layer} underflow in {history.low} since step {since:,}"
            yield Advice(rule="underflow", text=text, key=key, since=since)
    if key.kind == "update":
        yield from _of_updates(rows, key)


def _of_updates(rows: list[tuple[int, Statistics]], key: ValueKey) -> Iterator[Advice]:
    largest, smallest = THRESHOLDS["largest_update"].value, THRESHOLDS["smallest_update"].value
    layer = key.layer or "the model"
    since = _since(rows, lambda row: row.update_ratio is not None and row.update_ratio > largest)
    if since is not None:
        text = f"updates of {layer} are {rows[-1][1].update_ratio:.0%} of its weights since step {since:,}"
        yield Advice(rule="largest_update", text=text, key=key, since=since)
    since = _since(rows, lambda row: row.update_ratio is not None and 0 < row.update_ratio < smallest)
    if since is not None:
        text = f"updates of {layer} are rounded away by its weights since step {since:,}"
        yield Advice(rule="smallest_update", text=text, key=key, since=since)


def _since(rows: list[tuple[int, Statistics]], test: Callable[[Statistics], bool]) -> int | None:
    """The first step of the last unbroken run of steps for which `test` holds; None if it does not hold now."""
    since = None
    for step, row in reversed(rows):
        if not test(row):
            break
        since = step
    return since
