"""Which loops end when floats that they compute have become small: fixed points, solvers, searches.

Rounding inside of such a loop leads it into a cycle, and a tolerance below the rounding error is never met.  What
counts is that the condition follows from a comparison of floats, directly or through booleans and integers of an
iteration before, and that something low is on the way to these floats.  So loops that count stay low, and so does the
generation of tokens, which ends by the index of a largest element.

The fronts tell what the values of a program follow from; `LoopGraph` decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from xla_amp.analysis.value_graph import reached

_Value = TypeVar("_Value", bound=Hashable)


class LoopGraph(Generic[_Value]):
    """What the values of a program follow from, in any iteration and any call.

    A question about a loop names the values `inside` of it, also of the functions that it calls; None for all.
    """

    def __init__(self, is_float: Callable[[_Value], bool]) -> None:
        self.is_float = is_float
        self.sources: defaultdict[_Value, list[_Value]] = defaultdict(list)
        self.comparisons: set[_Value] = set()
        """Booleans and integers that are made by comparing or counting what they follow from."""
        self.low: set[_Value] = set()
        """What an operation that may run low gives."""

    def _sources(self, value: _Value, inside: Container[_Value] | None) -> Sequence[_Value]:
        return self.sources.get(value, ()) if inside is None or value in inside else ()

    def compared(self, values: Iterable[_Value], inside: Container[_Value] | None = None) -> list[_Value]:
        """The floats whose comparisons some values are."""
        made = (value for value in values if value in self.comparisons)
        return [each for value in made for each in self._sources(value, inside) if self.is_float(each)]

    def follow_low(
        self, values: Iterable[_Value], inside: Container[_Value] | None = None, kept: Container[_Value] = ()
    ) -> bool:
        """Whether something low, of which nothing is `kept`, is on the way to one of some values."""
        found = reached(values, lambda value: self._sources(value, inside)) & self.low
        return any((inside is None or value in inside) and value not in kept for value in found)

    def ends_by_floats(
        self, condition: Iterable[_Value], inside: Container[_Value] | None = None, kept: Container[_Value] = ()
    ) -> bool:
        """Whether floats that `follow_low` are compared on the way to a condition, through booleans and integers."""
        logic = reached(condition, lambda value: [v for v in self._sources(value, inside) if not self.is_float(v)])
        return self.follow_low(self.compared(logic, inside), inside, kept)
