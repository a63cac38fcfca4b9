"""Which ``while`` loops end when floats that they compute have become small: fixed points, solvers, searches.

Rounding inside of such a loop leads it into a cycle, and a tolerance below the rounding error is never met.  What
counts is that the condition follows from a comparison of floats, directly or through booleans and integers of an
iteration before, and that something low is on the way to these floats.  So loops that count stay low, and so does the
generation of tokens, which ends by the index of a largest element.

The analysis visits each jaxpr once: where a result comes from is summed up in terms of the arguments of its jaxpr.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

from xla_amp.jax import compat, rebind
from xla_amp.jax.jaxpr_analysis import nodes, per_jaxpr, runs_low
from xla_amp.jax.primitives import info
from xla_amp.policy import Policy

_NONE: Final[frozenset[int]] = frozenset()


class _Origin(NamedTuple):
    """Where a value comes from, in terms of the arguments of its jaxpr, or of the operands of its equation."""

    needs: frozenset[int] = _NONE
    """What it depends on."""
    low: bool = False
    """Whether an operation that the policy makes low is on the way."""
    logic: frozenset[int] = _NONE
    """Booleans and integers that it depends on through others, if it is one itself."""
    compared: frozenset[int] = _NONE
    """What the floats depend on whose comparison it depends on, through booleans and integers."""
    compared_low: bool = False
    """Whether something low is on the way to these floats."""

    def __or__(self, other: _Origin) -> _Origin:
        return _Origin(
            self.needs | other.needs,
            self.low or other.low,
            self.logic | other.logic,
            self.compared | other.compared,
            self.compared_low or other.compared_low,
        )

    def of(self, operands: Sequence[_Origin]) -> _Origin:
        """Where it comes from if its arguments are `operands`."""
        parts = (self.needs, self.logic, self.compared)
        needed, logical, compared = ([operands[index] for index in each] for each in parts)
        return _Origin(
            _NONE.union(*(each.needs for each in needed)),
            self.low or any(each.low for each in needed),
            _NONE.union(*(each.logic for each in logical)),
            _NONE.union(*(each.compared for each in logical), *(each.needs for each in compared)),
            self.compared_low or any(e.compared_low for e in logical) or any(each.low for each in compared),
        )


def ends_by_floats(eqn: Any, policy: Policy, *, low_carry: bool) -> bool:
    """Whether the end of a ``while`` depends on a comparison of floats that low operations would change.

    `low_carry`: whether what it carries may be low.
    """
    end = _end(eqn, policy)
    return end.compared_low or (low_carry and bool(end.compared))


@per_jaxpr
def solves(jaxpr: Any, policy: Policy, low_carry: bool) -> bool:
    """Whether a jaxpr contains a loop that `ends_by_floats`."""
    return any(
        (node.row.kind == "while" and ends_by_floats(node.eqn, policy, low_carry=low_carry))
        or any(solves(inner, policy, low_carry) for inner in node.inside)
        for node in nodes(jaxpr)
        if node.inside
    )


def _end(eqn: Any, policy: Policy) -> _Origin:
    """Where the condition of a ``while`` comes from, in terms of the loop's operands."""
    operands = list(range(len(eqn.invars)))
    condition, _, carry = rebind.looped(eqn.params, operands)
    (proceed,) = _results(eqn.params["cond_jaxpr"].jaxpr, policy)
    carried = _carried(eqn, policy)
    return proceed.of([*(_argument(eqn.invars[index], index) for index in condition), *carried[: len(carry)]])


@per_jaxpr
def _results(jaxpr: Any, policy: Policy) -> tuple[_Origin, ...]:
    """Where each result of a jaxpr comes from."""
    found: dict[Any, _Origin] = {variable: _argument(variable, n) for n, variable in enumerate(jaxpr.invars)}

    def read(atom: Any) -> _Origin:
        return _Origin() if isinstance(atom, compat.Literal) else found.get(atom, _Origin())

    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        found.update(zip(eqn.outvars, (each.of(operands) for each in _of_equation(eqn, policy)), strict=True))
    return tuple(map(read, jaxpr.outvars))


def _argument(atom: Any, number: int) -> _Origin:
    alone = frozenset({number})
    return _Origin(needs=alone, logic=_NONE if _is_float(atom) else alone)


def _is_float(atom: Any) -> bool:
    return bool(jnp.issubdtype(getattr(atom.aval, "dtype", np.bool_), jnp.inexact))


def _of_equation(eqn: Any, policy: Policy) -> Sequence[_Origin]:
    """Where each result of an equation comes from, in terms of its operands."""
    row = info(eqn.primitive.name)
    if row.kind in _INSIDE:
        return _INSIDE[row.kind](eqn, policy)
    floats = frozenset(number for number, atom in enumerate(eqn.invars) if _is_float(atom))
    everything = frozenset(range(len(eqn.invars)))
    low = runs_low(eqn, policy)
    found = []
    for variable in eqn.outvars:
        if _is_float(variable):
            found.append(_Origin(everything, low))
        else:
            compares = row.kind == "conversion" or (row.exact and variable.aval.dtype == np.bool_)
            found.append(_Origin(everything, low, everything - floats, floats if compares else _NONE))
    return found


def _of_call(eqn: Any, policy: Policy) -> Sequence[_Origin]:
    return _results(rebind.inner(eqn.params).jaxpr, policy)


def _of_cond(eqn: Any, policy: Policy) -> Sequence[_Origin]:
    operands = [_argument(atom, number) for number, atom in enumerate(eqn.invars)]
    branches = [_results(branch.jaxpr, policy) for branch in eqn.params["branches"]]
    merged = (functools.reduce(_Origin.__or__, each) for each in zip(*branches, strict=True))
    return _decided((each.of(operands[1:]) for each in merged), operands[0], eqn)


def _of_scan(eqn: Any, policy: Policy) -> Sequence[_Origin]:
    return _carried(eqn, policy)


def _of_while(eqn: Any, policy: Policy) -> Sequence[_Origin]:
    end = _end(eqn, policy)
    results = _decided(_carried(eqn, policy), end, eqn)
    if end.compared_low:  # it stays float32 itself
        return [each._replace(low=False, compared_low=False) for each in results]
    return results


def _decided(results: Any, condition: _Origin, eqn: Any) -> list[_Origin]:
    """Results of a loop, or of one of several functions, whose number or choice follows from `condition`."""
    only_needs = condition._replace(logic=_NONE, compared=_NONE, compared_low=False)
    pairs = zip(results, eqn.outvars, strict=True)
    return [each | (only_needs if _is_float(variable) else condition) for each, variable in pairs]


def _carried(eqn: Any, policy: Policy) -> list[_Origin]:
    """Where the results of a loop come from after any number of iterations, in terms of the loop's operands."""
    params, numbers = eqn.params, list(range(len(eqn.invars)))
    if info(eqn.primitive.name).kind == "while":
        body, parts = params["body_jaxpr"].jaxpr, [*rebind.looped(params, numbers)[1:], []]
    else:
        body, parts = rebind.inner(params).jaxpr, [*rebind.scanned(params, numbers)]
    own, now, steps = ([_argument(eqn.invars[number], number) for number in part] for part in parts)
    made = _results(body, policy)
    while True:
        after = [each.of([*own, *now, *steps]) for each in made]
        merged = [one | other for one, other in zip(now, after, strict=False)]
        if merged == now:
            return [*now, *after[len(now) :]]
        now = merged


_INSIDE: Final[Mapping[str | None, Callable[[Any, Policy], Sequence[_Origin]]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("call", "checkpoint", "composite", "custom_jvp", "custom_vjp", "custom_vmap", "linear_call", "shard_map"),
            _of_call,
        ),
        "cond": _of_cond,
        "scan": _of_scan,
        "while": _of_while,
    }
)
"""Kind of primitive -> where its results come from through the jaxprs that it contains."""
