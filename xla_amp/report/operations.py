"""The table of a program's operations, and the answers to the reader's questions, for every report that has them."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from xla_amp.report import paths, units
from xla_amp.report.document import Column, Finding, Row, State, Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation of the program; what is unknown is empty or None."""

    operation: str
    scope: str = ""
    """Path of the layer, with dots."""
    shapes: str = ""
    before: str = ""
    """dtypes of the operands, as the program passed them."""
    after: str = ""
    """dtypes of the same operands as the operation got them, if they differ."""
    result: str = ""
    flops: int | None = None
    """Of a product or convolution."""
    bytes: int | None = None
    """Bytes that it reads and writes."""
    casts: int | None = None
    """Casts of its operands."""
    seconds_16_bits: float | None = None
    """Estimate of a product and its gradient of the data in bfloat16."""
    seconds_8_bits: float | None = None
    """The same in 8-bit floats, scaling included."""
    seconds_scaling: float | None = None
    error: float | None = None
    """Relative error of its result."""
    reference_error: float | None = None
    nonfinite: int | None = None
    where: str = ""
    """The user's ``file:line``."""
    cast: str = ""
    layer: str = ""
    rule: str = ""
    why: str = ""
    source: str = ""
    product: bool = False
    """Whether it is a product, a convolution or a recurrent cell."""
    state: State = ""


FLOAT8_COLUMNS: Final = (
    Column("in bf16", "seconds", meaning="Estimate of the product and its gradient of the data in bfloat16"),
    Column("in 8 bits", "seconds", meaning="The same in 8-bit floats, scaling included"),
    Column("of that scaling", "seconds", meaning="Finding the scales of the operands and rounding them to 8 bits"),
)
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
    *FLOAT8_COLUMNS,
    Column("cast", meaning="What the policy asks for"),
    Column("layer", meaning="Layer of the policy in which the rule is"),
    Column("rule", meaning="Where the rule is written"),
    Column("where", "place", meaning="The line of the program"),
    Column("shapes", meaning="Shapes of the operands and of the result"),
    Column("casts", "count", sum=True, meaning="Casts of the operands"),
    Column("why", detail=True, meaning="The reason for the dtype"),
    Column("source", detail=True, meaning="Where the rule comes from"),
)

_FIELDS: Final = (
    "operation", "scope", "before", "after", "result", "error", "reference_error", "nonfinite", "flops", "bytes",
    "seconds_16_bits", "seconds_8_bits", "seconds_scaling", "cast", "layer", "rule", "where", "shapes", "casts", "why",
    "source",
)  # fmt: skip


def table(operations: Iterable[Operation], *, title: str = "Operations", note: str = "") -> Table:
    """The table; operations that are equal in every field are one row, in order of first appearance."""
    counted = Counter(operations)
    summed = {"flops", "bytes", "casts", "nonfinite"}
    rows = []
    for each, count in counted.items():
        values = [getattr(each, name) for name in _FIELDS]
        values = [v * count if name in summed and v is not None else v for name, v in zip(_FIELDS, values, strict=True)]
        rows.append(Row((count, *values), each.state))
    return Table(title=title, columns=COLUMNS, rows=tuple(rows), note=note).without_empty_columns()


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
    """What runs in float32 that could be low, where, and what it costs; what runs low that should not."""
    could = [each for each in operations if each.state == "could"]
    risk = [each for each in operations if each.state == "risk"]
    total = sum(each.flops or 0 for each in operations)
    cost = sum(each.flops or 0 for each in could)
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
    casts = sum(each.casts or 0 for each in operations)
    if casts:
        scopes: dict[str, list[str]] = defaultdict(list)
        where = Counter[str]()
        for each in operations:
            if each.casts:
                where[paths.pattern(each.scope)] += each.casts
                scopes[paths.pattern(each.scope)].append(each.scope)
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


def _largest(operations: Iterable[Operation], most: int) -> tuple[tuple[str, str], ...]:
    """The most expensive ones; equal ones of numbered layers together."""
    groups: dict[tuple[str, str, str, str], list[Operation]] = defaultdict(list)
    for each in operations:
        groups[each.operation, paths.pattern(each.scope), each.where, each.why].append(each)
    ranked = sorted(groups.items(), key=lambda item: -sum(each.flops or each.bytes or 0 for each in item[1]))
    items = []
    for (operation, _, where, why), alike in ranked[:most]:
        cost = sum(each.flops or 0 for each in alike)
        scope = paths.together([each.scope for each in alike])
        what = f"{len(alike)} x {operation}" if len(alike) > 1 else operation
        parts = (scope and f"in {scope}", units.flops(cost) if cost else "", where, why)
        items.append((what, ", ".join(filter(None, parts))))
    if len(ranked) > most:
        items.append((f"and {len(ranked) - most} more kinds", ""))
    return tuple(items)
