"""From the decisions of a run to candidates, and from a plan to a policy, with what was measured as the reason."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from xla_amp.common import units
from xla_amp.common.events import DecisionRecord
from xla_amp.common.types import Cast, LowDtype
from xla_amp.policy import Policy, Rule, module_patterns, op_catalog
from xla_amp.policy import load as load_policy
from xla_amp.policy.load import check, rule
from xla_amp.policy.policy import MEASURED, RuleLayer
from xla_amp.tools.search.planner import Candidate, Plan

BASE = "lean"
"""The policy below the rows: everything that may run low does, and what no plan should lower is float32."""
_PRODUCT: Final = "dot_general"


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
    plan: Plan,
    candidates: Sequence[Candidate],
    low: LowDtype,
    why: Callable[[Sequence[Candidate]], str] = lambda _: f"a plan of a {MEASURED}",
) -> Policy:
    """The policy under which a front runs `plan`: rows in the order of the program, `why` gives the reason of each."""
    groups: dict[tuple[str, Cast], list[Candidate]] = {}
    for each in candidates:
        groups.setdefault((each.scope, "low" if each.name in plan else "fp32"), []).append(each)
    rows = [
        rule(f"{MEASURED}, row {number}", [each.name for each in found], cast, why=why(found), source=MEASURED)
        for number, ((_, cast), found) in enumerate(groups.items(), 1)
    ]
    return _policy(tuple(rows), low)


@functools.lru_cache(maxsize=64)
def _policy(found: tuple[Rule, ...], low: LowDtype) -> Policy:
    base = load_policy(BASE)
    layer = check(RuleLayer(layer="file", origin=MEASURED, rules=found))
    layers = (*base.layers, layer)
    return Policy(name="searched", low=low, jax_low=low, dtypes=base.dtypes, layers=layers, source=MEASURED)


def to_toml(found: Policy, summary: str, lines: Sequence[str] = ()) -> str:
    """The text of a policy file for the rows of `found`; `lines` become comments at its top."""
    head = [f"# {line}" for line in lines]
    head += ["", f"name = {_text(found.name)}", f"extends = {_text(BASE)}", f"low = {_text(found.low)}"]
    head += [f"summary = {_text(summary)}", f"source = {_text(found.source)}"]
    body = [
        line
        for row in found.layers[-1].rules
        for line in (
            "",
            "[[rule]]",
            f"operations = [{', '.join(map(_text, row.operations))}]",
            f"cast = {_text(row.cast)}",
            f"why = {_text(row.why)}",
        )
    ]
    return "\n".join([*head, *body, ""])


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's strings are TOML's
