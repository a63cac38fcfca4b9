"""What `find_overflow` reports on every front: the operation that made the first inf or NaN, and its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from xla_amp.common import units
from xla_amp.common.events import Place
from xla_amp.common.types import RANGES
from xla_amp.pages.page import Page, Report, Section

MOST = 5
"""Producers that a report holds."""


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
    least: float = 0.0
    """Least of its finite values, with its sign; 0 for complex numbers."""
    greatest: float = 0.0
    """Greatest of its finite values, with its sign; 0 for complex numbers."""

    @classmethod
    def of(cls, name: str, dtype: str, shape: Sequence[int], values: np.ndarray[Any, Any]) -> ProducerOperand:
        """The operand with these `values`, in float64 or complex128, of any shape."""
        values = values.reshape(-1)
        size = np.abs(values)
        finite, nonzero = np.isfinite(size), size[np.isfinite(size) & (size > 0)]
        signed = values[finite] if values.dtype.kind != "c" and finite.any() else np.zeros(1)
        return cls(
            name=name,
            dtype=dtype,
            shape=tuple(shape),
            smallest=float(nonzero.min()) if nonzero.size else 0.0,
            largest=float(nonzero.max()) if nonzero.size else 0.0,
            least=float(signed.min()),
            greatest=float(signed.max()),
            infinities=int(np.isinf(size).sum()),
            nans=int(np.isnan(size).sum()),
        )

    def __str__(self) -> str:
        extra = f", {self.infinities:,} inf" if self.infinities else ""
        extra += f", {self.nans:,} NaN" if self.nans else ""
        sizes = f"{self.smallest:.3g} to {self.largest:.3g}" if self.largest else "all zero"
        signed = f" {self.least:.3g} to {self.greatest:.3g}," if self.least < 0 else ""
        return f"{self.dtype} {units.shape(self.shape)},{signed} magnitudes {sizes}{extra}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Producer:
    """An operation whose result has an inf or NaN that its operands do not have."""

    place: Place
    made: str
    """``inf`` or ``nan``."""
    inputs: tuple[ProducerOperand, ...]
    result: str
    """dtype of the result."""

    def headline(self, verb: str = "made") -> str:
        """The operation, what it made, and where, on one line."""
        place = self.place
        what = f"{place.operation} {verb} {self.made}"
        what += f" in the {place.phase} pass" if place.phase else ""
        what += f" (gradient of {place.gradient_of})" if place.gradient_of else ""
        what += f", {place.iteration}" if place.iteration else ""
        what += f", module {place.module}" if place.module else ""
        return what + (f", {place.location}" if place.location else "")

    def described(self) -> list[tuple[str, str]]:
        """(operand, its dtype, shape and values), and the same of the result."""
        items = [(operand.name, str(operand)) for operand in self.inputs]
        if self.made == "inf" and self.result in RANGES:
            limit = RANGES[self.result].largest
            items.append(("result", f"{self.result}, which holds magnitudes up to {limit:.3g}"))
        return items


def produced(made: str, *, given: str, written: str) -> bool:
    """Whether an operation made its ``inf`` or ``nan`` itself, neither given by its operands nor written as a number.

    The three are ``inf``, ``nan`` or empty.  A NaN that is computed from an infinity is made.
    """
    return "nan" not in (given, written) and (made == "nan" or not (given or written))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OverflowReport(Report):
    """The result of `find_overflow`; ``print(report)`` for people."""

    producers: tuple[Producer, ...]
    """Operations that produced an inf or NaN from operands without it, in order; at most five."""
    passed_on: Producer | None = None
    """If there is none, and a gradient or a result is not finite: the first operation that passed on an inf or NaN that
    the program was given or wrote as a constant."""
    operations: int
    """Number of operations that ran."""
    nonfinite_gradients: tuple[str, ...] = ()
    """In PyTorch: parameters with nonfinite gradients."""
    arguments: tuple[str, ...] = ()
    """In JAX: arguments that are not finite."""
    results: tuple[str, ...] = ()
    """Results that are not finite."""
    not_watched: tuple[str, ...] = ()
    """What only the results of were seen, or nothing; empty if every operation was seen."""
    scale: float | None = None
    """The loss scale; None without a scaler."""

    @property
    def first(self) -> Producer | None:
        """The operation that produced the first inf or NaN; None if no operation that was watched did."""
        return self.producers[0] if self.producers else None

    def page(self) -> Page:
        """The report for people."""
        facts = {"operations": f"{self.operations:,}"} | (
            {} if self.scale is None else {"loss scale": f"{self.scale:g}"}
        )
        bad = self.first or self.passed_on
        return Page("An inf or NaN" if bad else "All is finite", facts, [*self._found(), *self._nonfinite()])

    def _found(self) -> list[Section]:
        question = "Which operation made the first inf or NaN?"
        if self.first is not None:
            others = [(each.headline(), "") for each in self.producers[1:]]
            later = [Section("Which made another one later?", f"{len(others)} more", others)] if others else []
            return [Section(question, self.first.headline(), self.first.described()), *later]
        if self.passed_on is None:
            return [Section(question, "no operation that was watched made one")]
        what = "a NaN" if self.passed_on.made == "nan" else "an inf"
        answer = f"no operation made {what}; the first that passed one on that it was given (an argument, a constant):"
        items = [(self.passed_on.headline("passed on"), ""), *self.passed_on.described()]
        return [Section(question, answer, items)]

    def _nonfinite(self) -> list[Section]:
        found = []
        for what, names in (
            ("gradients", self.nonfinite_gradients),
            ("arguments", self.arguments),
            ("results", self.results),
        ):
            if names:
                more = f" and {len(names) - 6} more" if len(names) > 6 else ""
                answer = f"{len(names)}: {', '.join(names[:6])}{more}"
                found.append(Section(f"Which {what} are not finite?", answer))
        if self.producers and not (found or self.not_watched):
            answer = f"the results are finite: the {self.producers[0].made} did not reach them"
            found.append(Section("Which results are not finite?", answer))
        if self.not_watched:
            items = [(f"not watched: {each}", "") for each in self.not_watched]
            found.append(Section("What was not watched?", "only its results were seen, or nothing", items))
        return found
