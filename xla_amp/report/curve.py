"""A `Curve` as SVG for the page."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from xla_amp.report import units
from xla_amp.report.document import Curve


class Polyline(NamedTuple):
    """A curve in pixels."""

    parts: tuple[str, ...]
    """``points`` of each part between steps without a finite value."""
    bad: tuple[float, ...]
    """Where values were not finite."""
    lowest: str
    highest: str
    newest: str


WIDTH: Final = 300
HEIGHT: Final = 80


def line(curve: Curve) -> Polyline:
    """`curve` in pixels, its smallest value at the bottom and its largest at the top."""
    finite = [value for value in curve.values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    first, last = curve.steps[0], curve.steps[-1]
    parts: list[list[str]] = [[]]
    bad = []
    for step, value in zip(curve.steps, curve.values, strict=True):
        x = round((step - first) / max(last - first, 1) * WIDTH, 1)
        if value is None or not math.isfinite(value):
            parts.append([])
            if value is not None:
                bad.append(x)
            continue
        share = (value - low) / (high - low) if high > low else 0.5
        parts[-1].append(f"{x},{round((1 - share) * HEIGHT, 1)}")
    known = [value for value in curve.values if value is not None]
    lowest, highest, newest = (units.cell(value, "count") for value in (low, high, known[-1] if known else None))
    return Polyline(tuple(" ".join(part) for part in parts if part), tuple(bad), lowest, highest, newest)
