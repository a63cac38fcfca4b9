"""The page of a conversion: the decision about each operation, and what could still be low."""

from __future__ import annotations

import dataclasses

from xla_amp.common import units
from xla_amp.stablehlo import locations
from xla_amp.stablehlo.conversion_report import ConversionReport, OperationDecision
from xla_amp.tools.explain import operations
from xla_amp.tools.explain.operations import Operation
from xla_amp.tools.explain.page import Page


def page(report: ConversionReport, title: str = "a StableHLO program in mixed precision") -> Page:
    """The report for people."""
    found = [_operation(each) for each in report.operations]
    return Page(title, report.facts(), (*operations.findings(found), operations.table(found, "Decisions")))


def _operation(each: OperationDecision) -> Operation:
    low, product = units.is_low(each.after), each.product
    moves = each.colour == "clear" and not product
    shown = dataclasses.replace(
        each,
        operation=each.operation.partition("#")[0],
        location=locations.Location(each.location).line,
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
