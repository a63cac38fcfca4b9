"""Programs inside of primitives: what a handler of one gets, walking them, and what they contract."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

from xla_amp import events
from xla_amp.jax import compat
from xla_amp.jax.decisions import decide, is_float
from xla_amp.jax.value_info import magnitude
from xla_amp.policy import Policy


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One primitive with programs inside, as a handler gets it."""

    primitive: Any
    operands: list[Any]
    params: dict[str, Any]
    avals: list[Any] | None
    """Types of the operands in the program text; None while a program runs."""
    eqn: Any
    wanted: list[bool]
    walker: Any

    def walk(self) -> Any:
        """A walker for a program inside."""
        from xla_amp.jax.interpreter import Walker

        inside = self.eqn is not None and any(map(compat.is_transpose, compat.scopes(self.eqn)))
        return Walker(self.walker.rules, backward=self.walker.backward or inside)

    def is_weight(self, place: int) -> bool:
        """Whether an operand comes from outside."""
        return bool(self.walker.frame.is_weight(self.operands[place]))

    def flags(self) -> tuple[bool, ...]:
        """`is_weight` of all operands."""
        return tuple(self.is_weight(place) for place in range(len(self.operands)))

    def cast(self, value: Any, dtype: Any) -> Any:
        """`value` in `dtype`, where casts apply to both."""
        return self.walker.frame.cast(value, dtype) if is_float(dtype) else value


_Cache = weakref.WeakKeyDictionary[Any, dict[Any, compat.ClosedJaxpr]]
_walked: _Cache = weakref.WeakKeyDictionary()
"""Program -> what it was walked under -> the result, so that a function that is called again is traced and compiled
once."""


def retrace(
    call: Call,
    closed: compat.ClosedJaxpr,
    values: Sequence[Any],
    weights: tuple[bool, ...],
    *,
    fixed: bool = True,
    copied: tuple[int, ...] = (),
    **options: Any,
) -> compat.ClosedJaxpr:
    """A program walked for arguments of the types of `values`.

    Args:
        call: the primitive that contains it.
        closed: the program.
        values: its arguments.
        weights: which of them come from outside.
        fixed: whether what is a number in the text around it is one inside as well.
        copied: places of arguments whose low copies follow as further arguments.
        **options: for `Walker.run`.
    """
    low = call.walker.rules.low
    avals = [*types_of(values), *(compat.with_dtype(compat.typeof(values[place]), low) for place in copied)]
    walker = call.walk()
    scalars = {place: value for place, value in enumerate(values) if fixed and magnitude(value) is not None}
    known_scalars = tuple((place, str(value.dtype), float(value)) for place, value in scalars.items())
    asked = (walker.rules, walker.rules.now(), walker.backward)
    key = (*asked, tuple(avals), weights, known_scalars, copied, tuple(options.items()))
    cache = _walked.setdefault(closed.jaxpr, {})
    known = cache.get(key) if not closed.consts else None
    if known is None or events.sinks:

        def walked(*arguments: Any) -> list[Any]:
            inside = [scalars.get(place, argument) for place, argument in enumerate(arguments[: len(values)])]
            for place, copy in zip(copied, arguments[len(values) :], strict=True):
                walker.frame.give_low(inside[place], copy)
            return walker.run(closed, inside, weights=weights, **options)

        known = compat.trace(walked, avals, closed.jaxpr.debug_info)
        if not closed.consts:
            cache[key] = known
    return known


def types_of(values: Sequence[Any]) -> list[Any]:
    """Avals of values."""
    return [compat.typeof(value) for value in values]


_contractions: weakref.WeakKeyDictionary[Any, dict[Policy, tuple[bool, ...]]] = weakref.WeakKeyDictionary()


def contracted(jaxpr: Any, policy: Policy) -> tuple[bool, ...]:
    """For each argument of a program, whether a low contraction reads it."""
    cache = _contractions.setdefault(jaxpr, {})
    if policy not in cache:
        reads: set[Any] = set()
        for eqn in reversed(jaxpr.eqns):
            decision, treatment = decide(policy, eqn.primitive.name)
            kind = treatment.kind if treatment else None
            if kind == "contraction" and decision.cast == "low":
                reads.update(atom for atom in eqn.invars[:2] if not isinstance(atom, compat.Literal))
            elif kind == "moves" and eqn.outvars[0] in reads and not isinstance(eqn.invars[0], compat.Literal):
                reads.add(eqn.invars[0])
            elif kind in ("call", "checkpoint"):
                (inner,) = compat.sub_jaxprs(eqn.params)
                flags = zip(eqn.invars, contracted(inner, policy), strict=True)
                reads.update(atom for atom, flag in flags if flag and not isinstance(atom, compat.Literal))
        cache[policy] = tuple(var in reads for var in jaxpr.invars)
    return cache[policy]
