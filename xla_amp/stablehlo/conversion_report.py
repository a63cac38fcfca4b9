"""The report of the pass: its decision about each operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xla_amp.common import events, units
from xla_amp.common.events import DecisionRecord
from xla_amp.common.types import LowDtype
from xla_amp.pages import operations
from xla_amp.pages.operations import Operation
from xla_amp.pages.page import Page, Report
from xla_amp.stablehlo.locations import Location
from xla_amp.stablehlo.op_table import Colour


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperationDecision(DecisionRecord):
    """The decision about one operation that reads or writes float32, or one value that a loop or branch carries.

    Its name is ``dot_general``, ``reduce.add``; a value that is passed on has its index: ``while#2``.  `given` and
    `used` have the dtypes of the computation; several only where those of a product's operands differ.  `result` is
    float32 for a low contraction that returns its accumulator.  `location` is the whole text.
    """

    function: str
    colour: Colour
    product: bool
    """Whether it is a product or a convolution."""
    aten: str
    """ATen operation whose rule decided; empty if none corresponds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Achieved:
    """The errors of a converted program on samples, each of the worst result, against the original."""

    samples: tuple[tuple[float, str], ...]
    """For each sample the error, and the name of the result."""
    rounding: float
    """What one rounding of the samples changes in the program as it was, the worst of the results and samples."""
    not_judged: tuple[str, ...] = ()
    """Results that are rounding errors in float32 already; they only count if they become infinite or NaN."""

    @property
    def error(self) -> float:
        """The worst."""
        return max(error for error, _ in self.samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionReport(Report):
    """Decisions in program order, and the casts that they needed; ``print(report)`` shows a table."""

    policy: str
    low: LowDtype
    operations: tuple[OperationDecision, ...]
    casts: Mapping[str, int]
    """``f32->bf16`` and ``bf16->f32``: how many casts were inserted."""
    folded: int
    """Casts of the original program that were folded or removed."""
    unconverted: tuple[str, ...] = ()
    """Functions of several blocks, which stay as they are."""

    def rows(self) -> list[dict[str, Any]]:
        """One flat dict for each decision: ``pandas.DataFrame(report.rows())``."""
        same = (
            "operation", "function", "module", "location", "colour", "why", "cast", "layer", "product", "aten",
            "before", "after", "origin", "flops", "bytes",
        )  # fmt: skip
        return [
            {name: getattr(each, name) for name in same}
            | {"result": ", ".join(each.result), "shapes": units.shapes(each.shapes, each.result_shapes)}
            for each in self.operations
        ]

    def facts(self) -> dict[str, str]:
        """Policy and casts as text."""
        casts = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.casts.items())) or "none"
        if not any(map(units.is_low, {dtype for each in self.operations for dtype in (each.after, *each.result)})):
            casts += ": nothing was converted"
        kept = f"{', '.join(self.unconverted)}: functions of several blocks (branches of the dialect cf)"
        return {
            "policy": f"{self.policy}, low = {self.low}",
            "casts inserted": casts,
            "casts folded": str(self.folded),
            **({"not converted": kept} if self.unconverted else {}),
        }

    def page(self, title: str = "a StableHLO program in mixed precision") -> Page:
        """The report for people, as ``xla-amp convert`` shows it."""
        found = list(map(_operation, self.operations))
        return Page(title, self.facts(), (*operations.findings(found), operations.table(found, "Decisions")))


def _operation(each: OperationDecision) -> Operation:
    low, product = units.is_low(each.after), each.product
    moves = each.colour == "clear" and not product
    shown = dataclasses.replace(
        each,
        operation=each.operation.partition("#")[0],
        location=Location(each.location).line,
        why=f"{each.colour}: {each.why}",
    )
    return Operation(
        record=shown,
        product=product,
        verdict=operations.verdict(
            floating=not moves and each.operation not in ("argument", "result"),
            cast=False,
            low=low,
            product=product,
            ruled=each.colour in ("deny", "widest"),
            risky=operations.overrides(each, each.aten),
        ),
    )


def emit_events(report: ConversionReport) -> None:
    """Sends the decisions to the subscribers of `xla_amp.common.events` (`xla_amp.explain`)."""
    for each in report.operations if events.decided.listeners else ():
        events.decided(each)
