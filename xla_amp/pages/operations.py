"""The table of a program's operations, and the answers to the reader's questions, for every page that has them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias

from xla_amp.analysis import costs
from xla_amp.common import units
from xla_amp.common.events import DecisionRecord
from xla_amp.common.tables import Cell, Table
from xla_amp.pages import paths
from xla_amp.pages.page import Section
from xla_amp.policy import BUILTIN, load

Verdict: TypeAlias = Literal["risk", "could", "low", "wide", "same", "cast", "plumbing"]
"""``risk``: low where the built-in rules say float32; ``could``: float32 that could be low; ``wide``: float32 on
purpose; ``same``: float32 without a rule; ``plumbing``: integers, views or constants."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation of the program and what a report says of it."""

    record: DecisionRecord
    verdict: Verdict
    product: bool = False
    """Whether it is a product, a convolution or a recurrent cell."""


_COLUMNS: Final = (
    "operation", "count", "before", "after", "result", "module", "FLOP", "bytes", "cast", "layer", "rule", "where",
)  # fmt: skip
_OPTIONAL: Final = ("bytes", "FLOP", "layer", "cast", "rule")


def table(operations: Iterable[Operation], title: str = "Operations") -> Section:
    """The operations in the order of the program, equal ones together, without integers and plumbing."""
    alike = _alike(operations)
    shown = [each for each in alike if each[0].verdict != "plumbing"]
    hidden = len(alike) - len(shown)
    note = f"without {hidden:,} row{'' if hidden == 1 else 's'} of integers and plumbing" if hidden else ""
    rows = list(map(_row, shown))
    return Section(
        title, table=Table(columns=_COLUMNS, rows=rows, right=("FLOP", "bytes"), optional=_OPTIONAL, note=note)
    )


def _alike(operations: Iterable[Operation]) -> list[list[Operation]]:
    """Operations that look the same, also in layers that differ in their numbers only, in order of first appearance."""
    groups: dict[tuple[object, ...], list[Operation]] = defaultdict(list)
    for each in operations:
        known = each.record
        dtypes = (_dtypes(known.given), _dtypes(known.used), _dtypes(known.result))
        rule = (known.cast, known.layer, known.origin)
        groups[known.operation, paths.pattern(known.module), dtypes, rule, known.location, each.verdict].append(each)
    return list(groups.values())


def _row(alike: list[Operation]) -> tuple[Cell, ...]:
    records = [each.record for each in alike]
    first = records[0]
    flops, moved = _sum(each.flops for each in records), _sum(map(costs.moved, records))
    return (
        first.operation,
        len(alike),
        _dtypes(first.given),
        _dtypes(first.used) if first.used != first.given else "",
        _dtypes(first.result),
        paths.together(each.module for each in records),
        None if flops is None else units.flops(flops),
        None if moved is None else units.size(moved),
        *((first.cast, first.layer, first.origin) if first.origin else ("", "", "")),
        paths.line(first.location),
    )


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _different(texts: Iterable[str], most: int = 3) -> str:
    found = list(filter(None, dict.fromkeys(texts)))
    return "; ".join(found[:most]) + (f"; and {len(found) - most} more" if len(found) > most else "")


def _dtypes(names: Iterable[str]) -> str:
    """The different ones: ``bf16, f32``."""
    return ", ".join(dict.fromkeys(map(units.short, names)))


def verdict(*, floating: bool, cast: bool, low: bool, product: bool, ruled: bool, risky: bool) -> Verdict:
    """The verdict; `cast`: it only changes the dtype, `ruled`: a rule asks for float32, or it got a low operand."""
    if not floating:
        return "plumbing"
    if cast:
        return "cast"
    if low:
        return "risk" if risky else "low"
    if product:
        return "could"
    return "wide" if ruled else "same"


def overrides(record: DecisionRecord, aten: str) -> bool:
    """Whether the user has a rule for `aten`, an operation that the built-in rules keep in float32."""
    if record.layer == "builtin" or not aten:
        return False
    return load(record.policy if record.policy in BUILTIN else "tpu").decision(aten).cast.startswith("fp32")


def findings(operations: Sequence[Operation], *, most: int = 5) -> tuple[Section, ...]:
    """What runs in float32 that could be low, what runs low that should not, and what is float32 for which reason."""
    could = [each for each in operations if each.verdict == "could"]
    risk = [each for each in operations if each.verdict == "risk"]
    products = sum(each.product for each in operations)
    total = sum(each.record.flops or 0 for each in operations)
    cost = sum(each.record.flops or 0 for each in could)
    found = []
    if could:
        answer = f"{len(could)} of {products} products and convolutions"
        if total and cost:
            answer += f", {units.flops(cost)} of {units.flops(total)} ({100 * cost / total:.3g} %)"
    else:
        answer = "nothing: every product and convolution runs low" if products else "nothing: no products"
    question = "What runs in float32 that could be low?"
    found.append(Section(question, answer, _largest(could, most)))
    answer = f"{_number(risk)} that the built-in rules keep in float32" if risk else "nothing that the rules know"
    found.append(Section("What runs low that should not?", answer, _largest(risk, most)))
    wide = [each for each in operations if each.verdict == "wide"]
    asked = [each for each in wide if each.record.why not in ("", _FOLLOWS)]
    for question, alike in (
        ("What is float32 on purpose, and why?", asked),
        ("What is float32 because an operand is?", [each for each in wide if each not in asked]),
    ):
        if alike:
            found.append(Section(question, _number(alike), _reasons(alike, most)))
    return tuple(found)


_FOLLOWS: Final = "an operand is float32"
"""The reason of StableHLO's front; the others give none."""


def _number(operations: Sequence[Operation]) -> str:
    return f"{len(operations)} operation{'' if len(operations) == 1 else 's'}"


def _reasons(operations: Iterable[Operation], most: int) -> tuple[tuple[str, str], ...]:
    """Operations with the reason for their dtype, the most frequent reasons first."""
    named: dict[str, list[str]] = defaultdict(list)
    for each in operations:
        named[each.record.why].append(each.record.operation)
    ranked = sorted(named.items(), key=lambda item: -len(item[1]))
    items = [(f"{len(names)} x {', '.join(dict.fromkeys(names))}", why) for why, names in ranked[:most]]
    if len(ranked) > most:
        items.append((f"and {len(ranked) - most} more reasons", ""))
    return tuple(items)


def _largest(operations: Iterable[Operation], most: int) -> tuple[tuple[str, str], ...]:
    """The most expensive ones."""

    def cost(alike: list[Operation]) -> int:
        return sum(each.record.flops or costs.moved(each.record) or 0 for each in alike)

    ranked = sorted(_alike(operations), key=cost, reverse=True)
    items = []
    for alike in ranked[:most]:
        records = [each.record for each in alike]
        flops, scope = _sum(each.flops for each in records), paths.together(each.module for each in records)
        cells = (scope and f"in {scope}", flops and units.flops(flops), paths.line(records[0].location))
        what = f"{len(alike)} x {records[0].operation}" if len(alike) > 1 else records[0].operation
        items.append((what, ", ".join(str(cell) for cell in (*cells, _different(r.why for r in records)) if cell)))
    if len(ranked) > most:
        items.append((f"and {len(ranked) - most} more kinds", ""))
    return tuple(items)
