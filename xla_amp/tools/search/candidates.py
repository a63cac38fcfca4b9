"""What a plan decides: operations of one scope that run low together or in float32 together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from xla_amp.common import units
from xla_amp.common.events import DecisionRecord
from xla_amp.policy import module_patterns, op_catalog

_PRODUCT: Final = "dot_general"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Operations of one kind in one scope."""

    name: str
    """Pattern of a rule that reaches it: ``module:h.0.attn.linear``, or ``linear`` outside scopes."""
    scope: str = ""
    operation: str = ""
    flops: int = 0
    """Of the forward pass."""
    count: int = 1
    """Number of operations."""


def from_records(records: Iterable[DecisionRecord]) -> tuple[Candidate, ...]:
    """The candidates of a program, in the order of its operations.

    An operation that computes in float32 and gives the dtype of its operand (the cast ``fp32_inside``) is none.

    `records` are of one run under the policy in which everything that may run low does.
    """
    groups: dict[tuple[str, str], list[DecisionRecord]] = {}
    for record in records:
        if record.cast == "low" and _floating(record):
            groups.setdefault((record.module, _operation(record)), []).append(record)
    return tuple(
        Candidate(
            name=f"{module_patterns.PREFIX}{scope}.{operation}" if scope else operation,
            scope=scope,
            operation=operation,
            flops=sum(record.flops or 0 for record in found),
            count=len(found),
        )
        for (scope, operation), found in groups.items()
    )


def _operation(record: DecisionRecord) -> str:
    """What a rule names it.

    Outside torch a product may have been a ``linear`` or a ``bmm``, so rules for these would disagree about it;
    ``dot_general`` reaches all of them, on every front.
    """
    return (
        _PRODUCT if record.front != "pytorch" and record.operation in op_catalog.native(_PRODUCT) else record.operation
    )


def _floating(record: DecisionRecord) -> bool:
    dtypes = (*record.used, *record.result)
    return record.operation in op_catalog.catalogue().classes and any(d == "float32" or units.is_low(d) for d in dtypes)
