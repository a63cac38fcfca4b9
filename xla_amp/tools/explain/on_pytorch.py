"""`explain`: report the dtype decision for every operation of a block: cast, rule, inserted conversions."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Final

from xla_amp.common import events, units
from xla_amp.common.events import DecisionRecord
from xla_amp.jax import primitives
from xla_amp.pages import operations
from xla_amp.pages.page import Page, Report
from xla_amp.pages.precision_report import PrecisionReport, summarize
from xla_amp.policy.op_catalog import is_contraction

_CONVERSIONS: Final = frozenset({"_to_copy", "convert_element_type", "to"})
"""Operations that only change the dtype."""
_PLUMBING: Final = frozenset(
    {
        "copy_", "detach", "empty_like", "fill_", "full_like", "new_empty", "new_empty_strided", "new_zeros",
        "ones_like", "resize_", "zero_", "zeros_like", "reshape", "squeeze", "transpose", "clone",
    }
)  # fmt: skip
"""Operations of torch that move or create values and round nothing; `xla_amp.jax.primitives` has those of JAX."""


class ExplainReport(Report):
    """The operations of one `explain` block, in execution order; may be read while the block runs.

    ``print(report)`` shows findings and a table, `rows` gives dicts.
    """

    def __init__(self) -> None:
        self.records: list[DecisionRecord] = []
        """One `DecisionRecord` for each operation that ran in an autocast region, of any thread."""

    def __len__(self) -> int:
        return len(self.records)

    def rows(self) -> list[dict[str, str]]:
        """One flat dict for each operation: ``pandas.DataFrame(report.rows())``.

        Keys: operation, module, cast, layer, policy, before, after, result, casts, rule, why, source, location, front.
        Several dtypes are separated by ", "; ``casts`` lists the conversions, ``float32->bfloat16``, one per operand.
        """
        same = "operation", "module", "cast", "layer", "policy", "why", "source", "location", "front"
        joined = {"before": "given", "after": "used", "result": "result", "casts": "casts"}
        return [
            {name: getattr(entry, name) for name in same}
            | {name: ", ".join(getattr(entry, field)) for name, field in joined.items()}
            | {"rule": entry.origin}
            for entry in self.records
        ]

    def precision(self) -> PrecisionReport:
        """What ran low: contractions, float32 regions and casts, for each module and in total."""
        return summarize(self.records)

    def page(self) -> Page:
        """The report for people."""
        found = [_operation(entry) for entry in self.records]
        inserted = Counter(cast for entry in self.records for cast in entry.casts)
        casts = ", ".join(f"{count} x {kind}" for kind, count in inserted.most_common()) or "none"
        policies = ", ".join(dict.fromkeys(entry.policy for entry in self.records)) or "none"
        count = len(self.records)
        return Page(
            title=f"{count:,} operation{'' if count == 1 else 's'} under autocast",
            facts={"policy": policies, "casts inserted": casts},
            sections=(*operations.findings(found), operations.table(found)),
        )


@contextlib.contextmanager
def explain() -> Iterator[ExplainReport]:
    """Reports every operation that runs in an autocast region while the block is open, on any engine and thread.

    Wrap it around a forward pass or a step; regions may open inside it or around it.  Without an open block the cost is
    one branch per operation with a rule; inside a block every operation goes through Python, and JAX traces and
    compiles again what this thread calls.

    Example:
        >>> import torch, xla_amp
        >>> with xla_amp.explain() as report, xla_amp.autocast("cpu"):
        ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        >>> report.rows()[-1]["operation"], report.rows()[-1]["result"], report.rows()[-1]["layer"]
        ('mm', 'bfloat16', 'builtin')
    """
    report = ExplainReport()
    with contextlib.ExitStack() as stack:
        if "torch" in sys.modules:
            from xla_amp.pytorch.autocast import operation_recorder

            stack.enter_context(operation_recorder.recording())
        if "xla_amp.jax.compat" in sys.modules:
            from xla_amp.jax import compat

            stack.enter_context(compat.retraced())  # the decisions are made while JAX traces
        for point in (events.decided, events.undecided):
            stack.enter_context(point.subscribed(report.records.append))
        yield report


def _operation(entry: DecisionRecord) -> operations.Operation:
    name, casts = entry.operation.partition(".")[0], len(entry.casts)
    floating = [dtype for dtype in entry.used if units.is_floating(dtype)]
    computes = floating or [dtype for dtype in entry.result if units.is_floating(dtype)]
    product = is_contraction(entry.operation)
    is_plumbing = name in _PLUMBING or primitives.info(name).plumbing
    return operations.Operation(
        record=entry,
        product=product,
        verdict=operations.verdict(
            floating=bool(computes) and (not is_plumbing or casts > 0),
            cast=name in _CONVERSIONS,
            low=bool(computes) and all(map(units.is_low, computes)),
            product=product,
            ruled=entry.cast.startswith("fp32") or any(map(units.is_low, entry.given)),
            risky=entry.cast == "low" and operations.overrides(entry, entry.operation),
        ),
    )
