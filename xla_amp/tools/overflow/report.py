"""What `find_overflow` reports on every front: the operation that made the first inf or NaN, and its operands."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from xla_amp.common.events import Place
from xla_amp.common.types import RANGES
from xla_amp.report import units
from xla_amp.report.document import Column, Document, Finding, Row, Table
from xla_amp.report.shown import Shown


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProducerOperand:
    """One operand, with its values before the operation."""

    name: str
    """The argument's name in the operation's schema, with an index for list elements; ``operand 0`` without names."""
    dtype: str
    shape: tuple[int, ...]
    smallest: float
    """Smallest nonzero magnitude of its finite values; 0 if there is none."""
    largest: float
    """Largest magnitude of its finite values."""
    infinities: int
    nans: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Producer:
    """An operation whose result has an inf or NaN that its operands do not have."""

    place: Place
    made: str
    """``inf`` or ``nan``."""
    inputs: tuple[ProducerOperand, ...]
    result: str
    """dtype of the result."""
    step: int
    """Index of the operation in the step, from 0."""
    element: tuple[int, ...] | None = None
    """Index of the first inf or NaN in the result; None where it was not looked for.  The first number is often that of
    the batch element."""


def headline(producer: Producer, verb: str = "made") -> str:
    """The operation, what it made, and where, on one line."""
    place = producer.place
    what = f"{place.operation} {verb} {producer.made}"
    if place.phase:
        what += f" in the {place.phase} pass"
    if place.gradient_of:
        what += f" (gradient of {place.gradient_of})"
    if place.iteration:
        what += f", {place.iteration}"
    if place.module:
        what += f", module {place.module}"
    return what + (f", {place.location}" if place.location else "")


def _described(producer: Producer) -> tuple[tuple[str, str], ...]:
    """(operand, its dtype, shape and values), and the same of the result."""
    items = []
    for operand in producer.inputs:
        extra = f", {operand.infinities:,} inf" if operand.infinities else ""
        extra += f", {operand.nans:,} NaN" if operand.nans else ""
        sizes = f"{operand.smallest:.3g} to {operand.largest:.3g}" if operand.largest else "all zero"
        items.append((operand.name, f"{operand.dtype} {units.shape(operand.shape)}, magnitudes {sizes}{extra}"))
    if producer.made == "inf" and producer.result in RANGES:
        items.append(
            ("result", f"{producer.result}, which holds magnitudes up to {RANGES[producer.result].largest:.3g}")
        )
    if producer.element:
        items.append((f"first in element {list(producer.element)} of the result", ""))
    return tuple(items)


def produced(made: str, operands: tuple[ProducerOperand, ...], *, written: str = "") -> bool:
    """Whether an operation made its inf or NaN itself, neither given by its operands nor written by the program.

    Args:
        made: ``inf`` or ``nan``.
        operands: its operands.
        written: what the operation's own numbers are, if not finite: the ``nan`` of a constant, the ``inf`` of a mask's
            fill.  A NaN that is computed from an infinity is made.
    """
    given = any(operand.nans or (made == "inf" and operand.infinities) for operand in operands)
    return not given and written != "nan" and (made == "nan" or not written)


def reached(producers: Sequence[Producer], passed_on: Producer | None, *, finite: bool) -> Producer | None:
    """The operation to report that passed on an inf or NaN which the program was given or wrote as a constant.

    On every front that is no overflow until it reaches a result.

    Args:
        producers: operations that made one themselves.
        passed_on: the first that passed one on.
        finite: whether the results are finite.
    """
    return None if producers or finite else passed_on


def findings(producers: tuple[Producer, ...], passed_on: Producer | None, all_finite: str) -> list[Finding]:
    """What a report says about operations.

    Args:
        producers: as in a report.
        passed_on: of `reached`.
        all_finite: what to say if there is neither.
    """
    question = "Which operation made the first inf or NaN?"
    if producers:
        found = [Finding(question, headline(producers[0]), "risk", _described(producers[0]))]
        if len(producers) > 1:
            items = tuple((headline(producer), "") for producer in producers[1:])
            found.append(Finding("Which made another one later?", f"{len(items)} more", "risk", items))
        return found
    if passed_on is None:
        return [Finding(question, all_finite, "low")]
    items = ((headline(passed_on, "passed on"), ""), *_described(passed_on))
    what = "a NaN" if passed_on.made == "nan" else "an inf"
    answer = f"no operation made {what}; the first that passed one on that it was given (an argument, a constant):"
    return [Finding(question, answer, "could", items)]


def table(producers: tuple[Producer, ...], passed_on: Producer | None) -> Table:
    """The operands of the operations, for the page."""
    shown = [(each, each.made) for each in producers] + ([(passed_on, "passed on")] if passed_on else [])
    rows = [
        Row(
            (
                place.operation, place.module, place.phase, place.gradient_of, place.iteration, verb, operand.name,
                operand.dtype, units.shape(operand.shape), operand.smallest, operand.largest, operand.infinities,
                operand.nans, RANGES[operand.dtype].largest if operand.dtype in RANGES else None, place.location,
            ),
            "risk" if verb != "passed on" else "",
        )
        for producer, verb in shown
        for place in [producer.place]
        for operand in producer.inputs
    ]  # fmt: skip
    columns = (
        Column("operation"),
        Column("module", "scope"),
        Column("pass"),
        Column("gradient of"),
        Column("iteration"),
        Column("made"),
        Column("operand"),
        Column("dtype"),
        Column("shape"),
        Column("smallest", "error", meaning="Smallest magnitude that is not zero, before the operation"),
        Column("largest", "error", meaning="Largest finite magnitude, before the operation"),
        Column("inf", "count"),
        Column("NaN", "count"),
        Column("dtype holds", "error", meaning="Largest finite magnitude of the dtype"),
        Column("where", "place"),
    )
    title = "Operands of these operations"
    return Table(title=title, columns=columns, rows=tuple(rows), page_only=True).without_empty_columns()


class FoundProducers(Shown):
    """What the reports of all fronts have: they are dataclasses with ``producers``."""

    __slots__ = ()

    producers: tuple[Producer, ...]

    @property
    def first(self) -> Producer | None:
        """The operation that produced the first inf or NaN; None if no operation that was watched did."""
        return self.producers[0] if self.producers else None

    def to_json(self, indent: int | None = None) -> str:
        """Everything as JSON."""
        fields: Any = self
        return json.dumps(dataclasses.asdict(fields), indent=indent)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOverflowReport(FoundProducers):
    """The result of `find_overflow` in JAX and StableHLO; ``print(report)`` for people, `to_json` for programs."""

    producers: tuple[Producer, ...]
    """Operations that produced an inf or NaN from operands without it, in order; at most five."""
    passed_on: Producer | None
    """If there is none, and a result is not finite: the first operation that passed on an inf or NaN which the program
    was given or wrote as a constant."""
    arguments: tuple[str, ...]
    """Arguments that are not finite."""
    results: tuple[str, ...]
    """Results that are not finite."""
    operations: int
    """Number of operations that ran."""
    not_watched: tuple[str, ...]
    """What only the results of were seen, or nothing; empty if every operation was seen."""

    def document(self) -> Document:
        """The report for people: `xla_amp.report` writes it as a page or as text."""
        found = findings(self.producers, self.passed_on, "no operation that was watched made one")
        if self.arguments:
            answer = f"{len(self.arguments)}: {_some(self.arguments)}"
            found.append(Finding("Which arguments are not finite?", answer, "risk" if self.results else "could"))
        if self.results:
            answer = f"{len(self.results)}: {_some(self.results)}"
            found.append(Finding("Which results are not finite?", answer, "risk"))
        elif self.producers:
            answer = "the results of the function are finite: it did not use what is named above"
            found.append(Finding("Which results are not finite?", answer, "low"))
        if self.not_watched:
            items = tuple((f"not watched: {each}", "") for each in self.not_watched)
            found.append(Finding("What was not watched?", "only its results were seen, or nothing", "could", items))
        return Document(
            title="A program with an inf or NaN" if self.producers or self.passed_on else "A finite program",
            kind="find_overflow",
            facts=(("operations", f"{self.operations:,}"),),
            findings=tuple(found),
            tables=(table(self.producers, self.passed_on),),
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
