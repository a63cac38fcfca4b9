"""A `Plot` and a `Curve` as SVG for the page."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from xla_amp.report import units
from xla_amp.report.document import Curve, Plot, State

WIDTH: Final = 640
HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 620, 15, 250


class Dot(NamedTuple):
    """A point in pixels."""

    x: float
    y: float
    state: State
    title: str


class Drawing(NamedTuple):
    """What the template draws, in pixels."""

    marks: tuple[Dot, ...]
    front: str
    """``points`` of the line through the plans that no other plan beats in both axes."""
    columns: tuple[tuple[float, str], ...]
    """Position and text of each power of ten."""
    rows: tuple[tuple[float, str], ...]
    limit: float | None
    chosen: tuple[float, float] | None


def drawing(plot: Plot) -> Drawing:
    """`plot` in pixels; points without a finite, positive x are left out."""
    shown = [p for p in plot.points if p.x > 0 and math.isfinite(p.x)]
    across = [p.x for p in shown] + [x for x in (plot.limit, plot.chosen and plot.chosen[0]) if x]
    low, high = (math.log10(f(across)) for f in (min, max)) if across else (-3.0, -2.0)
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    heights = [p.y for p in shown] + ([plot.chosen[1]] if plot.chosen else [])
    top = 1.05 * max(heights, default=1.0) or 1.0

    def across_at(x: float) -> float:
        return round(_LEFT + (math.log10(x) - low) / (high - low) * (_RIGHT - _LEFT), 1)

    def down_at(y: float) -> float:
        return round(_BOTTOM - y / top * (_BOTTOM - _TOP), 1)

    marks = tuple(
        Dot(across_at(p.x), down_at(p.y), p.state, f"{p.label}: {units.error(p.x)}, {units.time(p.y)}") for p in shown
    )
    front: list[str] = []
    best = math.inf
    for point in sorted(shown, key=lambda p: (p.x, p.y)):
        if point.y < best:
            best = point.y
            front.append(f"{across_at(point.x)},{down_at(point.y)}")
    return Drawing(
        marks=marks,
        front=" ".join(front),
        columns=tuple((across_at(10.0**k), f"1e{k:+03d}") for k in range(low, high + 1)),
        rows=tuple((down_at(top * k / 4), units.time(top * k / 4) if k else "0") for k in range(5)),
        limit=across_at(plot.limit) if plot.limit else None,
        chosen=(across_at(plot.chosen[0]), down_at(plot.chosen[1])) if plot.chosen and plot.chosen[0] > 0 else None,
    )


class Line(NamedTuple):
    """A curve in pixels."""

    parts: tuple[str, ...]
    """``points`` of each part between steps without a finite value."""
    bad: tuple[float, ...]
    """Where values were not finite."""
    lowest: str
    highest: str
    newest: str


CURVE_WIDTH: Final = 300
CURVE_HEIGHT: Final = 80


def line(curve: Curve) -> Line:
    """`curve` in pixels, its smallest value at the bottom and its largest at the top."""
    finite = [value for value in curve.values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    first, last = curve.steps[0], curve.steps[-1]
    parts: list[list[str]] = [[]]
    bad = []
    for step, value in zip(curve.steps, curve.values, strict=True):
        x = round((step - first) / max(last - first, 1) * CURVE_WIDTH, 1)
        if value is None or not math.isfinite(value):
            parts.append([])
            if value is not None:
                bad.append(x)
            continue
        share = (value - low) / (high - low) if high > low else 0.5
        parts[-1].append(f"{x},{round((1 - share) * CURVE_HEIGHT, 1)}")
    known = [value for value in curve.values if value is not None]
    lowest, highest, newest = (units.cell(value, "count") for value in (low, high, known[-1] if known else None))
    return Line(tuple(" ".join(part) for part in parts if part), tuple(bad), lowest, highest, newest)
