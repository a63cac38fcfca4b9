"""Sets of values that follow from each other in the graph of a program, whatever front has built it.

The fronts name the values (variables of a jaxpr, values or slots of a module) and tell what each follows from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

_Value = TypeVar("_Value", bound=Hashable)


def reached(start: Iterable[_Value], near: Callable[[_Value], Iterable[_Value]]) -> set[_Value]:
    """`start` and all that is near it, directly or through others; `near`: what a value follows from, for example."""
    seen, todo = set[_Value](), list(start)
    while todo:
        value = todo.pop()
        if value not in seen:
            seen.add(value)
            todo += near(value)
    return seen


def settled(
    chosen: set[_Value],
    holds: Callable[[_Value, set[_Value]], bool],
    near: Callable[[_Value], Iterable[_Value]],
) -> set[_Value]:
    """The largest subset of `chosen` in which a condition holds for each.

    Args:
        holds: the condition of a value in a subset; it holds in a larger one, too.
        near: the values whose conditions may depend on that of a value.
    """
    left, todo = set(chosen), list(chosen)
    while todo:
        value = todo.pop()
        if value in left and not holds(value, left):
            left.discard(value)
            todo += near(value)
    return left


def cycles(
    values: Iterable[_Value],
    after: Callable[[_Value], Iterable[_Value]],
    before: Callable[[_Value], Iterable[_Value]],
) -> list[set[_Value]]:
    """The strongly connected components of several values (Kosaraju, Sharir 1981), in time linear in the graph.

    Args:
        after: what follows from a value.
        before: what a value follows from.
    """
    order: list[_Value] = []
    seen, todo = set[_Value](), [(value, False) for value in values]
    while todo:
        value, left = todo.pop()
        if left:
            order.append(value)
        elif value not in seen:
            seen.add(value)
            todo += [(value, True), *((each, False) for each in after(value))]
    found, done = list[set[_Value]](), set[_Value]()
    for value in reversed(order):
        if value not in done:
            found.append(reached((value,), lambda each: set(before(each)) - done))
            done.update(found[-1])
    return [each for each in found if len(each) > 1]
