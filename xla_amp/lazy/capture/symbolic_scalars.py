"""Floats that carry the formula by which Python computed them from an optimizer's hyperparameters.

In a recorded call each float of ``param_groups`` is a `SymbolicFloat`, whose arithmetic and comparisons are written to
a `FormulaTable`.  torch's dispatcher passes on only the value, so hyperparameters are shifted by a few units in the
last place, differently in each call: numbers of the trace are recognized by their value, and `FormulaTable.resolve`
restores the true ones before the program runs.  Users gain that learning-rate schedules replay without recompilation,
with any optimizer.

A path from hyperparameter to operation that is not arithmetic (``math.sqrt``) shows as a number that changes from call
to call, which prevents a capture.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

Read: TypeAlias = Callable[[], float]


class Hyperparameter(NamedTuple):
    """The location of a hyperparameter."""

    group: int
    """`id` of the optimizer's group, a dict that lives as long as the optimizer."""
    name: str
    position: int | None
    """Position in a tuple such as ``betas``, otherwise None."""


class Formula(NamedTuple):
    """An operation of `OPERATIONS` on hyperparameters, formulas and plain numbers."""

    operation: str
    operands: tuple[Any, ...]


ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
UNARY = ("neg", "pos", "abs")
COMPARISONS = ("lt", "le", "eq", "ne", "ge", "gt")
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in (*ARITHMETIC, *UNARY, *COMPARISONS, "truth")
}

Term: TypeAlias = Hyperparameter | Formula | float


def evaluate(term: Term, reads: Mapping[Hyperparameter, Read]) -> Any:
    """The term's value for the current hyperparameters."""
    if type(term) is Hyperparameter:
        return reads[term]()
    if type(term) is Formula:
        return OPERATIONS[term.operation](*[evaluate(operand, reads) for operand in term.operands])
    return term


class SymbolicFloat(float):
    """A float with the term that gave its value."""

    __slots__ = ("table", "term")

    term: Term
    table: FormulaTable

    __hash__ = float.__hash__


class FormulaTable:
    """The numbers computed from hyperparameters during one call, and the comparisons made with them."""

    def __init__(self, shift: int) -> None:
        """`shift` (0 or 1) selects the amounts by which hyperparameters are moved; consecutive calls alternate."""
        self._shift = shift
        self.reads: dict[Hyperparameter, Read] = {}
        self.terms: dict[float, dict[Term, None]] = {}
        """Value -> the terms that gave it: one, unless rounding made several equal."""
        self.conditions: dict[Formula, bool] = {}
        """Comparisons, with their outcome."""

    def track(self, hyperparameter: Hyperparameter, read: Read) -> SymbolicFloat:
        """A symbolic float for a hyperparameter that is not zero."""
        self.reads[hyperparameter] = read
        moved = read() * (1 + (2 * len(self.reads) + self._shift) * 2.0**-46)
        return self.symbol(moved, hyperparameter)

    def symbol(self, value: float, term: Term) -> SymbolicFloat:
        """A symbolic float with the value of `term`."""
        result = SymbolicFloat(value)
        result.term, result.table = term, self
        self.terms.setdefault(float(value), {})[term] = None
        return result

    def compare(self, operation: str, *terms: Term) -> bool:
        """The outcome of a comparison of the true values."""
        formula = Formula(operation, terms)
        return self.conditions.setdefault(formula, evaluate(formula, self.reads))

    def terms_of(self, numbers: list[float]) -> dict[int, tuple[Term, ...]]:
        """Index of each number that was computed from hyperparameters -> its terms."""
        return {index: tuple(self.terms[number]) for index, number in enumerate(numbers) if number in self.terms}

    def resolve(self, numbers: list[float]) -> None:
        """Replaces each number that was computed from hyperparameters by the true one, in place."""
        for index, terms in self.terms_of(numbers).items():
            numbers[index] = evaluate(terms[0], self.reads)


def _term(value: Any) -> Any:
    return value.term if type(value) is SymbolicFloat else value


def _value(value: Any) -> Any:
    return float(value) if type(value) is SymbolicFloat else value


_NUMBERS = (int, float, SymbolicFloat)


def _arithmetic(name: str, reflected: bool) -> Callable[[SymbolicFloat, Any], Any]:
    function = OPERATIONS[name]

    def method(self: SymbolicFloat, other: Any) -> Any:
        if type(other) not in _NUMBERS:
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        return self.table.symbol(function(_value(left), _value(right)), Formula(name, (_term(left), _term(right))))

    return method


def _unary(name: str) -> Callable[[SymbolicFloat], SymbolicFloat]:
    return lambda self: self.table.symbol(OPERATIONS[name](float(self)), Formula(name, (self.term,)))


def _comparison(name: str) -> Callable[[SymbolicFloat, Any], Any]:
    def method(self: SymbolicFloat, other: Any) -> Any:
        if type(other) not in _NUMBERS:
            return NotImplemented
        return self.table.compare(name, self.term, _term(other))

    return method


for _name in ARITHMETIC:
    setattr(SymbolicFloat, f"__{_name}__", _arithmetic(_name, reflected=False))
    setattr(SymbolicFloat, f"__r{_name}__", _arithmetic(_name, reflected=True))
for _name in UNARY:
    setattr(SymbolicFloat, f"__{_name}__", _unary(_name))
for _name in COMPARISONS:
    setattr(SymbolicFloat, f"__{_name}__", _comparison(_name))
setattr(SymbolicFloat, "__bool__", lambda self: self.table.compare("truth", self.term))  # noqa: B010  (a type for mypy)
