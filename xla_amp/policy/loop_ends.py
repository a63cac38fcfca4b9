"""Which loops end when floats that they compute have become small: fixed points, solvers, searches.

Rounding inside of such a loop leads it into a cycle, and a tolerance below the rounding error is never met.  What
counts is that the condition follows from a comparison of floats, directly or through booleans and integers of an
iteration before, and that something low is on the way to these floats.  So loops that count stay low, and so does the
generation of tokens, which ends by the index of a largest element.

The fronts tell what the values inside of a loop follow from; the functions of these decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from xla_amp.policy.value_graph import reached

_Value = TypeVar("_Value", bound=Hashable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopValues(Generic[_Value]):
    """The values inside of a loop, also in the functions that it calls."""

    sources: Callable[[_Value], Sequence[_Value]]
    """What a value follows from, in any iteration; nothing for one that is defined outside."""
    is_float: Callable[[_Value], bool]
    compares: Callable[[_Value], bool]
    """Whether an operation made the value by comparing or counting what it follows from."""
    is_low: Callable[[_Value], bool]
    """Whether an operation that may run low makes it inside of the loop."""

    def compared(self, value: _Value) -> list[_Value]:
        """The floats whose comparison a value is."""
        return list(filter(self.is_float, self.sources(value))) if self.compares(value) else []

    def deciding(self, condition: Iterable[_Value]) -> list[_Value]:
        """The floats that are compared on the way to a loop's condition, through booleans and integers."""
        logic = reached(condition, lambda value: [each for each in self.sources(value) if not self.is_float(each)])
        return [each for value in logic for each in self.compared(value)]

    def follow_low(self, values: Iterable[_Value]) -> bool:
        """Whether something low is on the way to one of some values."""
        return any(map(self.is_low, reached(values, self.sources)))
