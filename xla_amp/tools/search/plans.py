"""A plan as a policy: one row for each scope and cast, with what was measured as the reason."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

from xla_amp.common.types import Cast, LowDtype
from xla_amp.policy import Policy, Rule
from xla_amp.policy import load as load_policy
from xla_amp.policy.load import check, rule
from xla_amp.policy.policy import MEASURED, RuleLayer
from xla_amp.tools.search.candidates import Candidate
from xla_amp.tools.search.planner import Plan

BASE = "lean"
"""The policy below the rows: everything that may run low does, and what no plan should lower is float32."""


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
