"""What a plan decides: operations of one scope that run low together or in float32 together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from xla_amp.events import DecisionRecord
from xla_amp.plan_search.rates import Rates
from xla_amp.policy import module_patterns, op_catalog
from xla_amp.report import units
from xla_amp.types import Cast

_LOW_FORMS: tuple[Cast, ...] = ("low", "fp32_inside")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Operations of one kind in one scope."""

    name: str
    """Pattern of a rule that reaches it: ``module:h.0.attn.linear``, or ``linear`` outside scopes."""
    scope: str = ""
    operation: str = ""
    low: Cast = "low"
    """Its cast where it runs low."""
    seconds: float
    """Estimated time of the program that it saves by running low; a negative one loses."""
    bytes: int = 0
    """Bytes that it saves: operands and results, in the forward and the backward pass."""
    flops: int = 0
    count: int = 1
    """Number of operations."""


def from_records(
    records: Iterable[DecisionRecord], rates: Rates, *, low: str, backward: bool, outer: str = ""
) -> tuple[Candidate, ...]:
    """The candidates of a program, in the order of its operations.

    Args:
        records: of one run under the policy in which everything that may run low does.
        rates: of the machine that the plan is for.
        low: the low dtype.
        backward: whether a backward pass follows: two products for each product, and the same bytes once more.
        outer: scope of the whole program, which is no part of a rule.
    """
    groups: dict[tuple[str, str], list[DecisionRecord]] = {}
    for record in records:
        if record.cast in _LOW_FORMS and _floating(record):
            groups.setdefault((record.module.removeprefix(outer), record.operation), []).append(record)
    return tuple(
        _candidate(scope, operation, found, rates, low, backward) for (scope, operation), found in groups.items()
    )


def _floating(record: DecisionRecord) -> bool:
    dtypes = (*record.used, *record.result)
    return record.operation in op_catalog.catalogue().classes and any(d == "float32" or units.is_low(d) for d in dtypes)


def _candidate(
    scope: str, operation: str, records: Sequence[DecisionRecord], rates: Rates, low: str, backward: bool
) -> Candidate:
    saved = moved = flops = 0.0
    for record in records:
        product = op_catalog.is_contraction(operation)
        work = (record.flops or 0) * (3 if backward and product else 1)
        elements = sum(math.prod(max(1, size) for size in shape) for shape in (*record.shapes, *record.result_shapes))
        passes = (3 if product else 2) if backward else 1
        wide, narrow = 4 * elements * passes, 2 * elements * passes
        saved += rates.seconds(work, wide, "float32") - rates.seconds(work, narrow, low)
        moved += wide - narrow
        flops += work
    return Candidate(
        name=f"{module_patterns.PREFIX}{scope}.{operation}" if scope else operation,
        scope=scope,
        operation=operation,
        low=records[0].cast,
        seconds=saved,
        bytes=round(moved),
        flops=round(flops),
        count=len(records),
    )
