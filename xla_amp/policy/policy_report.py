"""A policy as a report: its rules, a later layer last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xla_amp.report.document import Column, Document, Row, Table

if TYPE_CHECKING:
    from xla_amp.policy.policy import Policy

_COLUMNS = (
    Column("operations", meaning="names, patterns, classes or modules that the rule reaches"),
    Column("cast"),
    Column("layer", meaning="a later row wins over an earlier one of another layer"),
    Column("why"),
    Column("rule", detail=True, meaning="file, variable or call that holds it"),
    Column("source", detail=True),
    Column("note", detail=True),
)


def document(policy: Policy) -> Document:
    """The rules of all layers, lowest rank first."""
    rows = tuple(
        Row((", ".join(rule.operations), rule.cast, layer.layer, rule.why, rule.origin, rule.source, rule.note))
        for layer in policy.layers
        for rule in layer.rules
    )
    facts = (("low", f"{policy.low}; may be {' or '.join(policy.dtypes)}"), ("about", policy.summary))
    return Document(
        title=f"Policy {policy.name}",
        kind="policy",
        facts=tuple((name, value) for name, value in facts if value),
        tables=(Table(title="Rules", columns=_COLUMNS, rows=rows, ranked=True),),
    )
