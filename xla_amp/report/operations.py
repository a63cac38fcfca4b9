"""The table of a program's operations, and the answers to the reader's questions, for every report that has them."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from xla_amp.common import costs
from xla_amp.common.events import DecisionRecord
from xla_amp.report import paths, units
from xla_amp.report.document import Cell, Column, Finding, Row, State, Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation of the program and what a report says of it; None is unknown."""

    record: DecisionRecord
    state: State = ""
    product: bool = False
    """Whether it is a product, a convolution or a recurrent cell."""
    casts: int | None = None
    """Casts of its operands that were inserted."""
    error: float | None = None
    """Relative error of its result."""
    reference_error: float | None = None
    nonfinite: int | None = None


COLUMNS: Final = (
    Column("count", "count", sum=True, meaning="Equal operations of one layer, of one line"),
    Column("operation"),
    Column("module", "scope", meaning="The layer, as a rule names it"),
    Column("before", meaning="dtypes of the operands as the program passed them"),
    Column("after", meaning="dtypes of the operands as the operation got them; empty: nothing was cast"),
    Column("result", meaning="dtype of the result"),
    Column("error", "error", meaning="Error of the result relative to the reference, errors of its operands included"),
    Column("error of A", "error", meaning="The same error of the first program"),
    Column("not finite", "count", sum=True, meaning="Elements that are finite in the reference only"),
    Column("FLOP", "flops", sum=True, meaning="Floating-point operations of products and convolutions"),
    Column("bytes", "bytes", sum=True, meaning="Bytes of operands and results"),
    Column("cast", meaning="What the policy asks for"),
    Column("layer", meaning="Layer of the policy in which the rule is"),
    Column("rule", meaning="Where the rule is written"),
    Column("where", "place", meaning="The line of the program"),
    Column("shapes", meaning="Shapes of the operands and of the result"),
    Column("casts", "count", sum=True, meaning="Casts of the operands"),
    Column("why", detail=True, meaning="The reason for the dtype"),
    Column("source", detail=True, meaning="Where the rule comes from"),
)


def table(operations: Iterable[Operation], *, title: str = "Operations", note: str = "") -> Table:
    """The table; operations that look the same are one row, in order of first appearance."""
    rows = []
    for (cells, state), count in Counter((_cells(each), each.state) for each in operations).items():
        columns = zip(cells, COLUMNS[1:], strict=True)
        summed = (v * count if c.sum and isinstance(v, int | float) else v for v, c in columns)
        rows.append(Row((count, *summed), state))
    return Table(title=title, columns=COLUMNS, rows=tuple(rows), note=note).without_empty_columns()


def _cells(each: Operation) -> tuple[Cell, ...]:
    """The cells of `COLUMNS` after the first."""
    record = each.record
    return (
        record.operation,
        record.module,
        _dtypes(record.given),
        _dtypes(record.used) if record.used != record.given else "",
        _dtypes(record.result),
        each.error,
        each.reference_error,
        each.nonfinite,
        record.flops,
        costs.moved(record),
        record.cast if record.origin else "",
        record.layer if record.origin else "",
        record.origin,
        record.location,
        " -> ".join(filter(None, (shapes(record.shapes), shapes(record.result_shapes)))),
        each.casts,
        record.why,
        record.source,
    )


def _dtypes(names: Iterable[str]) -> str:
    """The different ones: ``bf16, f32``."""
    return ", ".join(dict.fromkeys(map(units.short, names)))


def shapes(each: Iterable[tuple[int, ...]]) -> str:
    """``4x8, 8x8``."""
    return ", ".join(map(units.shape, each))


def state(*, floating: bool, cast: bool, low: bool, product: bool, ruled: bool, risky: bool) -> State:
    """The state of one operation.

    Args:
        floating: whether it has a floating-point operand or result.
        cast: whether it only changes the dtype.
        low: whether it computes in a low dtype.
        product: whether it is a product, a convolution or a recurrent cell.
        ruled: whether a rule asks for float32, or it got a low operand.
        risky: whether the built-in rules keep such an operation in float32.
    """
    if not floating:
        return "plumbing"
    if cast:
        return "cast"
    if low:
        return "risk" if risky else "low"
    if product:
        return "could"
    return "wide" if ruled else "same"


def findings(operations: Sequence[Operation], *, most: int = 5) -> tuple[Finding, ...]:
    """What runs in float32 that could be low, what runs low that should not, and what is float32 for which reason."""
    could = [each for each in operations if each.state == "could"]
    risk = [each for each in operations if each.state == "risk"]
    total = sum(each.record.flops or 0 for each in operations)
    cost = sum(each.record.flops or 0 for each in could)
    found = []
    if could:
        answer = f"{len(could)} of {_products(operations)} products and convolutions"
        if total and cost:
            answer += f", {units.flops(cost)} of {units.flops(total)} ({100 * cost / total:.3g} %)"
    else:
        answer = "nothing: every product and convolution runs low" if _products(operations) else "nothing: no products"
    found.append(
        Finding("What runs in float32 that could be low?", answer, "could" if could else "low", _largest(could, most))
    )
    answer = f"{_number(risk)} that the built-in rules keep in float32" if risk else "nothing that the rules know"
    found.append(Finding("What runs low that should not?", answer, "risk" if risk else "low", _largest(risk, most)))
    if wide := [each for each in operations if each.state == "wide"]:
        found.append(Finding("What is float32 on purpose, and why?", _number(wide), "wide", _reasons(wide, most)))
    casts = sum(each.casts or 0 for each in operations)
    if casts:
        scopes: dict[str, list[str]] = defaultdict(list)
        where = Counter[str]()
        for each in operations:
            if each.casts:
                where[paths.pattern(each.record.module)] += each.casts
                scopes[paths.pattern(each.record.module)].append(each.record.module)
        items = tuple(
            (f"{count:,}", f"in {paths.together(scopes[scope])}" if scope else "outside layers")
            for scope, count in where.most_common(most)
        )
        found.append(Finding("Where are the casts?", f"{casts:,} casts of operands", "cast", items))
    return tuple(found)


def _number(operations: Sequence[Operation]) -> str:
    return f"{len(operations)} operation{'' if len(operations) == 1 else 's'}"


def _products(operations: Iterable[Operation]) -> int:
    return sum(each.product for each in operations)


def _reasons(operations: Iterable[Operation], most: int) -> tuple[tuple[str, str], ...]:
    """Operations with the reason for their dtype, the most frequent reasons first."""
    named: dict[str, list[str]] = defaultdict(list)
    for each in operations:
        named[each.record.why or "an operand is float32"].append(each.record.operation)
    ranked = sorted(named.items(), key=lambda item: -len(item[1]))
    items = [(f"{len(names)} x {', '.join(dict.fromkeys(names))}", why) for why, names in ranked[:most]]
    if len(ranked) > most:
        items.append((f"and {len(ranked) - most} more reasons", ""))
    return tuple(items)


def _largest(operations: Iterable[Operation], most: int) -> tuple[tuple[str, str], ...]:
    """The most expensive ones; equal ones of numbered layers together."""
    groups: dict[tuple[str, str, str, str], list[Operation]] = defaultdict(list)
    for each in operations:
        record = each.record
        groups[record.operation, paths.pattern(record.module), record.location, record.why].append(each)
    ranked = sorted(
        groups.items(), key=lambda item: -sum(each.record.flops or costs.moved(each.record) or 0 for each in item[1])
    )
    items = []
    for (operation, _, where, why), alike in ranked[:most]:
        cost = sum(each.record.flops or 0 for each in alike)
        scope = paths.together([each.record.module for each in alike])
        what = f"{len(alike)} x {operation}" if len(alike) > 1 else operation
        parts = (scope and f"in {scope}", units.flops(cost) if cost else "", where, why)
        items.append((what, ", ".join(filter(None, parts))))
    if len(ranked) > most:
        items.append((f"and {len(ranked) - most} more kinds", ""))
    return tuple(items)
