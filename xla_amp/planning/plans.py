"""From the decisions of a run to candidates, and from a plan to a policy, with what was measured as the reason."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from xla_amp.common import units
from xla_amp.common.events import DecisionRecord
from xla_amp.common.types import Cast, LowDtype
from xla_amp.planning.planner import Candidate, Plan
from xla_amp.policy import Policy, module_patterns, op_catalog
from xla_amp.policy.load import from_text
from xla_amp.policy.policy import MEASURED

BASE = "lean"
"""The policy below the rows: everything that may run low does, and what no plan should lower is float32."""
_PRODUCT: Final = "dot_general"
Why: TypeAlias = Callable[[Sequence[Candidate]], str]
"""The reason of a row."""


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


def policy(
    plan: Plan, candidates: Sequence[Candidate], low: LowDtype, why: Why = lambda _: f"a plan of a {MEASURED}"
) -> Policy:
    """The policy under which a front runs `plan`: rows in the order of the program, `why` gives the reason of each."""
    return _read(to_toml(plan, candidates, low, why))


@functools.lru_cache(maxsize=64)
def _read(text: str) -> Policy:
    return from_text(MEASURED, text, "file")


def to_toml(
    plan: Plan,
    candidates: Sequence[Candidate],
    low: LowDtype,
    why: Why = lambda _: f"a plan of a {MEASURED}",
    summary: str = "",
    lines: Sequence[str] = (),
) -> str:
    """The text of a file of this policy; `lines` become comments at its top."""
    groups: dict[tuple[str, Cast], list[Candidate]] = {}
    for each in candidates:
        groups.setdefault((each.scope, "low" if each.name in plan else "fp32"), []).append(each)
    head = [f"# {line}" for line in lines]
    head += ["", 'name = "searched"', f"extends = {_text(BASE)}", f"low = {_text(low)}"]
    head += [f"summary = {_text(summary)}", f"source = {_text(MEASURED)}"]
    body = [
        line
        for (_, cast), found in groups.items()
        for line in (
            "",
            "[[rule]]",
            f"operations = [{', '.join(_text(each.name) for each in found)}]",
            f"cast = {_text(cast)}",
            f"why = {_text(why(found))}",
        )
    ]
    return "\n".join([*head, *body, ""])


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's strings are TOML's
