"""What a plan decides: operations of one scope that run low together or in float32 together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Final

from xla_amp.common.events import DecisionRecord
from xla_amp.common.types import Cast
from xla_amp.policy import module_patterns, op_catalog
from xla_amp.report import units
from xla_amp.tools.search.rates import Rates

_LOW_FORMS: Final[tuple[Cast, ...]] = ("low", "fp32_inside")
_NOT_FUSED: Final = frozenset({"contraction", "convolution", "recurrent", "reduction", "normalization", "loss"})
"""Classes of operations that read and write memory of their own."""


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


def from_records(records: Iterable[DecisionRecord], rates: Rates, *, low: str, backward: bool) -> tuple[Candidate, ...]:
    """The candidates of a program, in the order of its operations.

    Args:
        records: of one run under the policy in which everything that may run low does.
        rates: of the machine that the plan is for.
        low: the low dtype.
        backward: whether a backward pass follows: two products for each product, and the same bytes once more.
    """
    groups: dict[tuple[str, str], list[DecisionRecord]] = {}
    for record in records:
        if record.cast in _LOW_FORMS and _floating(record):
            groups.setdefault((record.module, _operation(record)), []).append(record)
    return tuple(
        _candidate(scope, operation, found, rates, low, backward) for (scope, operation), found in groups.items()
    )


def _operation(record: DecisionRecord) -> str:
    """What a rule names it.

    Outside torch a product may have been a ``linear`` or a ``bmm``, so rules for these would disagree about it;
    ``dot_general`` reaches all of them, on every front.
    """
    return (
        _PRODUCT if record.front != "pytorch" and record.operation in op_catalog.native(_PRODUCT) else record.operation
    )


_PRODUCT: Final = "dot_general"


def _floating(record: DecisionRecord) -> bool:
    dtypes = (*record.used, *record.result)
    return record.operation in op_catalog.catalogue().classes and any(d == "float32" or units.is_low(d) for d in dtypes)


def running_low(records: Iterable[DecisionRecord]) -> frozenset[str]:
    """Names of the candidates with a low operand or result in a recorded run.

    A norm in a plan gives the dtype of its operand, so beside float32 products it stays float32.
    """
    return frozenset(
        _name(record.module, _operation(record))
        for record in records
        if any(map(units.is_low, (*record.used, *record.result)))
    )


def _name(scope: str, operation: str) -> str:
    return f"{module_patterns.PREFIX}{scope}.{operation}" if scope else operation


def seconds(
    records: Iterable[DecisionRecord], candidates: Iterable[Candidate], rates: Rates, *, backward: bool
) -> float:
    """Estimated time of a recorded program, each operation in the dtypes that it has.

    Other elementwise operations than `candidates`, and those that only move values, cost nothing: XLA fuses them.
    """
    planned = {(each.scope, each.operation) for each in candidates}
    return math.fsum(
        _time(record, rates, backward, _narrower(record.given, record.used), record.result)
        for record in records
        if (record.module, _operation(record)) in planned
        or op_catalog.catalogue().classes.get(record.operation) in _NOT_FUSED
    )


def _narrower(given: Sequence[str], used: Sequence[str]) -> list[str]:
    """dtypes in which operands are read: a cast is fused with what makes or reads the value."""
    return [min(pair, key=units.bits) for pair in zip(given, used, strict=True)]


def _time(
    record: DecisionRecord, rates: Rates, backward: bool, operands: Sequence[str], results: Sequence[str]
) -> float:
    work, passes = _work(record, backward)
    moved = sum(
        _elements(shape) * units.bits(dtype) // 8
        for shapes, dtypes in ((record.shapes, operands), (record.result_shapes, results))
        for shape, dtype in zip(shapes, dtypes, strict=False)
    )
    floating = [dtype for dtype in operands if dtype in rates.peak]
    return rates.seconds(work, passes * moved, max(floating, key=units.bits) if floating else "float32")


def _work(record: DecisionRecord, backward: bool) -> tuple[float, int]:
    """FLOP of the forward and the backward pass, and how often its values are read or written."""
    product = op_catalog.is_contraction(record.operation)
    passes = (3 if product else 2) if backward else 1
    return (record.flops or 0) * (passes if product else 1), passes


def _elements(shape: Sequence[int]) -> int:
    return math.prod(max(1, size) for size in shape)


def _candidate(
    scope: str, operation: str, records: Sequence[DecisionRecord], rates: Rates, low: str, backward: bool
) -> Candidate:
    saved = moved = flops = 0.0
    for record in records:
        operands, results = (
            [[dtype] * len(ends) for dtype in ("float32", low)] for ends in (record.used, record.result)
        )
        wide, narrow = (_time(record, rates, backward, *ends) for ends in zip(operands, results, strict=True))
        work, passes = _work(record, backward)
        saved += wide - narrow
        moved += 2 * passes * sum(map(_elements, (*record.shapes, *record.result_shapes)))
        flops += work
    return Candidate(
        name=_name(scope, operation),
        scope=scope,
        operation=operation,
        low=records[0].cast,
        seconds=saved,
        bytes=round(moved),
        flops=round(flops),
        count=len(records),
    )
