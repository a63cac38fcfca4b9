"""Integers on the host that each call of a step changes by the same number: a replay does so, too."""

from __future__ import annotations

from typing import Any, Final

from xla_amp.lazy.capture.values import NotReplayableError
from xla_amp.training import bytecode

_MOST: Final = 1000
"""Values from one call to the next for which decisions are compared."""


class Count(tuple[Any, ...]):
    """What a counter was compared by: it is equal to that of each value by which a call decides the same.

    Args:
        before: what it was compared by before a call.
        after: the same, afterwards.
        code: what `bytecode.tests` reads.

    Raises:
        NotReplayableError: the code of the step does not count there, or it reads the count otherwise.
    """

    amount: int
    """What each call adds."""
    _tests: list[bytecode.Test]

    def __new__(cls, before: Any, after: Any, *code: Any) -> Count:
        count = super().__new__(cls, before)
        count.amount = int(after[-1]) - int(before[-1])
        try:
            count._tests = bytecode.tests(*code)
        except bytecode.ReadError as line:
            raise NotReplayableError(f" and reads it at {line}" if line.args else "") from None
        if count._tests and abs(count.amount) > _MOST:
            raise NotReplayableError(" by too much, and decides by it")
        return count

    def _decisions(self, by: tuple[Any, ...]) -> list[Any]:
        ends = int(by[-1]), int(by[-1]) + self.amount
        return [bytecode.decide(test, value) for test in self._tests for value in range(min(ends), max(ends) + 1)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple) or self[:-1] != other[:-1]:
            return False
        return not self._tests or self._decisions(self) == self._decisions(other)

    __hash__ = None  # type: ignore[assignment]
