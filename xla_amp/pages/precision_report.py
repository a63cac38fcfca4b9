"""`PrecisionReport`: which products of a program ran low, what stayed float32, what was cast, and what was saved."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from xla_amp.common.events import DecisionRecord
from xla_amp.common.tables import Table
from xla_amp.common.types import LOW_DTYPES
from xla_amp.pages import paths
from xla_amp.pages.page import Page, Report, Section
from xla_amp.policy.op_catalog import is_contraction


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Equal operations of one place."""

    count: int
    record: DecisionRecord
    """The first of them."""

    @property
    def dtype(self) -> str:
        """What it computes in."""
        return self.record.used[0] if self.record.used else ""


class Scope(NamedTuple):
    """Totals of one scope; `name` is "total" for all of them."""

    name: str
    low: int
    """Contractions in the low dtype."""
    float32: int
    """Contractions in another one."""
    float32_regions: int
    casts: int


class SavedBytes(NamedTuple):
    """Bytes that the forward pass keeps for the backward pass, besides the arguments."""

    autocast: int
    plain: int


@dataclasses.dataclass(frozen=True)
class PrecisionReport(Report):
    """What ran in the low dtype and what did not; ``print(report)`` shows tables.

    Contractions are matrix products, convolutions and recurrent cells.  A float32 region is another operation that got
    a low operand and computed in float32: the rule that asks for it is in ``why``.
    """

    low: tuple[Line, ...]
    """Contractions in the low dtype."""
    float32: tuple[Line, ...]
    """Contractions in another one."""
    float32_regions: tuple[Line, ...]
    casts: dict[str, int]
    """Conversion, ``float32->bfloat16``, -> how often it was inserted."""
    scopes: tuple[Scope, ...]
    """One for each scope, in order of appearance; the last is the total."""
    saved: SavedBytes | None = None
    """None where there is no backward pass, or it is part of the program."""

    def page(self) -> Page:
        """The report for people."""
        lines = Table(
            columns=("count", "operation", "runs in", "scope", "where", "why"),
            rows=[
                (line.count, each.operation, line.dtype, each.module, paths.line(each.location), each.why)
                for line in (*self.low, *self.float32, *self.float32_regions)
                for each in (line.record,)
            ],
        )
        totals = Table(columns=("scope", "low", "float32", "float32 regions", "casts"), rows=self.scopes)
        facts = {"casts": ", ".join(f"{count} x {kind}" for kind, count in self.casts.items()) or "none"}
        if self.saved is not None:
            facts["saved for the backward pass"] = f"{self.saved.autocast} bytes, {self.saved.plain} without autocast"
        *_, (_, low, float32, _, _) = self.scopes
        sections = Section("Operations", table=lines), Section("Scopes", table=totals)
        return Page(f"{low} of {low + float32} products and convolutions run low", facts, sections)


def summarize(records: Iterable[DecisionRecord], saved: SavedBytes | None = None) -> PrecisionReport:
    """The report of the operations that ran."""
    low: dict[Any, list[DecisionRecord]] = {}
    wide: dict[Any, list[DecisionRecord]] = {}
    float32_regions: dict[Any, list[DecisionRecord]] = {}
    casts: Counter[str] = Counter()
    scopes: dict[str, list[int]] = {}
    for record in records:
        casts.update(record.casts)
        totals = scopes.setdefault(record.module, [0, 0, 0, 0])
        totals[3] += len(record.casts)
        ran_low = any(dtype in LOW_DTYPES for dtype in record.used)
        if is_contraction(record.operation):
            found, index = (low, 0) if ran_low else (wide, 1)
        elif not ran_low and any(dtype in LOW_DTYPES for dtype in record.given):
            found, index = float32_regions, 2
        else:
            continue
        totals[index] += 1
        place = (record.operation, record.used[:1], record.module, record.location, record.why)
        found.setdefault(place, []).append(record)
    sums = [sum(column) for column in zip(*scopes.values(), strict=True)] or [0, 0, 0, 0]
    rows = [Scope(name, *numbers) for name, numbers in (*scopes.items(), ("total", sums))]
    totals_by_cast = dict(casts.most_common())
    return PrecisionReport(_lines(low), _lines(wide), _lines(float32_regions), totals_by_cast, tuple(rows), saved)


def _lines(found: dict[Any, list[DecisionRecord]]) -> tuple[Line, ...]:
    return tuple(Line(len(records), records[0]) for records in found.values())
