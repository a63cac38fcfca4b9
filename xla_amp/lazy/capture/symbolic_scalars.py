"""Python numbers that remember which hyperparameters they were computed from.

An optimizer reads ``group["lr"]``, computes with it and hands the result to an operation; torch's dispatcher passes
nothing on but the value.  So while a step is watched its hyperparameters are `Followed` floats: arithmetic with them is
written down, and a number that arrives at an operation is recognised by its value.  For that each hyperparameter is
moved by a few units in its last places, by other amounts in each call: a way from hyperparameter to operation that is
not arithmetic then shows as a number that changes from call to call.  Before anything runs, `Ledger.resolve` puts the
true numbers in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

Read: TypeAlias = Callable[[], float]


class Hyperparameter(NamedTuple):
    """Where a hyperparameter is."""

    group: int
    """`id` of the optimizer's group, a dict that lives as long as the optimizer."""
    name: str
    place: int | None
    """Place in a tuple such as ``betas``, else None."""


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
    """The term's value with the hyperparameters as they are now."""
    if type(term) is Hyperparameter:
        return reads[term]()
    if type(term) is Formula:
        return OPERATIONS[term.operation](*[evaluate(operand, reads) for operand in term.operands])
    return term


class Followed(float):
    """A float with the term that it is the value of."""

    __slots__ = ("ledger", "term")

    term: Term
    ledger: Ledger

    __hash__ = float.__hash__


class Ledger:
    """What was computed from hyperparameters during one call, and what was decided by comparing them."""

    def __init__(self, shift: int) -> None:
        """`shift` tells calls apart: hyperparameters are moved by other amounts in each."""
        self._shift = shift
        self.reads: dict[Hyperparameter, Read] = {}
        self.terms: dict[float, dict[Term, None]] = {}
        """Value that was seen -> the terms that gave it: one, unless rounding made several equal."""
        self.conditions: dict[Formula, bool] = {}
        """Comparisons made on the way, with their outcome."""

    def follow(self, hyperparameter: Hyperparameter, read: Read) -> Followed:
        """A stand-in for a hyperparameter that is not zero."""
        self.reads[hyperparameter] = read
        moved = read() * (1 + (2 * len(self.reads) + self._shift) * 2.0**-46)
        return self.note(moved, hyperparameter)

    def note(self, value: float, term: Term) -> Followed:
        """A float that is the value of `term`."""
        followed = Followed(value)
        followed.term, followed.ledger = term, self
        self.terms.setdefault(float(value), {})[term] = None
        return followed

    def decide(self, operation: str, *terms: Term) -> bool:
        """The outcome of a comparison, by the true values."""
        formula = Formula(operation, terms)
        return self.conditions.setdefault(formula, evaluate(formula, self.reads))

    def terms_of(self, numbers: list[float]) -> dict[int, tuple[Term, ...]]:
        """Which of `numbers`, by index, were computed from hyperparameters, and how."""
        return {index: tuple(self.terms[number]) for index, number in enumerate(numbers) if number in self.terms}

    def resolve(self, numbers: list[float]) -> None:
        """Replaces every number that was seen by the true one, in place."""
        for index, terms in self.terms_of(numbers).items():
            numbers[index] = evaluate(terms[0], self.reads)


def _term(value: Any) -> Term:
    return value.term if type(value) is Followed else value


_NUMBERS = (int, float, Followed)


def _arithmetic(name: str, reflected: bool) -> Callable[[Followed, Any], Any]:
    function = OPERATIONS[name]

    def method(self: Followed, other: Any) -> Any:
        if type(other) not in _NUMBERS:
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        return self.ledger.note(function(_plain(left), _plain(right)), Formula(name, (_term(left), _term(right))))

    return method


def _plain(value: Any) -> Any:
    return float(value) if type(value) is Followed else value


def _unary(name: str) -> Callable[[Followed], Followed]:
    return lambda self: self.ledger.note(OPERATIONS[name](float(self)), Formula(name, (self.term,)))


def _comparison(name: str) -> Callable[[Followed, Any], Any]:
    def method(self: Followed, other: Any) -> Any:
        if type(other) not in _NUMBERS:
            return NotImplemented
        return self.ledger.decide(name, self.term, _term(other))

    return method


for _name in ARITHMETIC:
    setattr(Followed, f"__{_name}__", _arithmetic(_name, reflected=False))
    setattr(Followed, f"__r{_name}__", _arithmetic(_name, reflected=True))
for _name in UNARY:
    setattr(Followed, f"__{_name}__", _unary(_name))
for _name in COMPARISONS:
    setattr(Followed, f"__{_name}__", _comparison(_name))
setattr(Followed, "__bool__", lambda self: self.ledger.decide("truth", self.term))  # noqa: B010  (a type for mypy)
