"""Which ``while`` loops end when floats that they compute have become small (`xla_amp.policy.loop_ends`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xla_amp.jax import compat, rebind
from xla_amp.jax.jaxpr_analysis import Node, nodes, per_jaxpr, runs_low
from xla_amp.policy import Policy
from xla_amp.policy.loop_ends import LoopValues


def ends_by_floats(eqn: Any, policy: Policy, *, low_carry: bool) -> bool:
    """Whether the end of a ``while`` depends on a comparison of floats that low operations would change.

    `low_carry`: whether what it carries may be low.
    """
    condition, body = _functions(eqn)
    of_condition, of_body, _ = rebind.looped(eqn.params, eqn.invars)
    return _ends_by_floats(body, condition, (len(of_condition), len(of_body)), policy, low_carry)


@per_jaxpr
def _ends_by_floats(body: Any, condition: Any, constants: tuple[int, int], policy: Policy, low_carry: bool) -> bool:
    inside = _Inside(policy, low_carry)
    inside.iterations(body, condition, constants, low=True)
    values = LoopValues(
        sources=lambda value: inside.sources.get(value, ()),
        is_float=_is_float,
        compares=inside.comparisons.__contains__,
        is_low=inside.low.__contains__,
    )
    deciding = values.deciding(compat.variables(condition.outvars))
    return bool(deciding) and (low_carry or values.follow_low(deciding))


@per_jaxpr
def solves(jaxpr: Any, policy: Policy, low_carry: bool) -> bool:
    """Whether a jaxpr contains a loop that `ends_by_floats`."""
    return any(
        (node.row.kind == "while" and ends_by_floats(node.eqn, policy, low_carry=low_carry))
        or any(solves(inner, policy, low_carry) for inner in node.inside)
        for node in nodes(jaxpr)
        if node.inside
    )


def _functions(eqn: Any) -> tuple[Any, Any]:
    """The condition and the body of a ``while``."""
    return eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr


def _is_float(atom: Any) -> bool:
    return bool(jnp.issubdtype(getattr(atom.aval, "dtype", np.bool_), jnp.inexact))


class _Inside:
    """What the values of jaxprs follow from; what is passed to a jaxpr from several places is one value there."""

    def __init__(self, policy: Policy, low_carry: bool) -> None:
        self._policy, self._low_carry = policy, low_carry
        self.sources: defaultdict[Any, list[Any]] = defaultdict(list)
        self.comparisons: set[Any] = set()
        """Booleans and integers that are made from floats."""
        self.low: set[Any] = set()
        """What an operation that the policy makes low gives."""
        self._seen: set[tuple[Any, bool]] = set()

    def _join(self, values: Sequence[Any], sources: Sequence[Any]) -> None:
        for value, source in zip(values, sources, strict=True):
            if not isinstance(source, compat.Literal):
                self.sources[value].append(source)

    def _enter(self, jaxpr: Any, given: Sequence[Any], made: Sequence[Any], low: bool) -> None:
        self._join(jaxpr.invars, given)
        self._join(made, jaxpr.outvars[: len(made)])
        self._visit(jaxpr, low)

    def _visit(self, jaxpr: Any, low: bool) -> None:
        if (jaxpr, low) not in self._seen:
            self._seen.add((jaxpr, low))
            for node in nodes(jaxpr):
                self._add(node, low)

    def _add(self, node: Node, low: bool) -> None:
        eqn, kind = node.eqn, node.row.kind
        if kind == "while":
            self.loop(eqn, low and not ends_by_floats(eqn, self._policy, low_carry=self._low_carry))
        elif kind == "scan":
            body, (_, carry, _) = rebind.inner(eqn.params).jaxpr, rebind.scanned(eqn.params, eqn.invars)
            self._join(rebind.scanned(eqn.params, body.invars)[1], body.outvars[: len(carry)])
            self._join(eqn.outvars[: len(carry)], carry)
            self._enter(body, eqn.invars, eqn.outvars, low)
        elif kind == "cond":
            for branch in eqn.params["branches"]:
                self._enter(branch.jaxpr, eqn.invars[1:], eqn.outvars, low)
            self._join(eqn.outvars, eqn.invars[:1] * len(eqn.outvars))
        elif kind in _CALLS:
            self._enter(rebind.inner(eqn.params).jaxpr, eqn.invars, eqn.outvars, low)
        else:
            self.sources.update((variable, list(node.reads)) for variable in eqn.outvars)
            if low and runs_low(eqn, self._policy):
                self.low.update(eqn.outvars)
            for variable in eqn.outvars:
                compares = kind == "conversion" or (node.row.exact and variable.aval.dtype == np.bool_)
                if compares and not _is_float(variable):
                    self.comparisons.add(variable)

    def loop(self, eqn: Any, low: bool) -> None:
        """Adds a ``while``; `low`: whether what is inside may be low."""
        condition, body = _functions(eqn)
        of_condition, of_body, carry = rebind.looped(eqn.params, eqn.invars)
        self.iterations(body, condition, (len(of_condition), len(of_body)), low)
        self._join(condition.invars, [*of_condition, *carry])
        self._join(body.invars, [*of_body, *carry])
        for sources in (carry, body.outvars, condition.outvars * len(eqn.outvars)):
            self._join(eqn.outvars, sources)

    def iterations(self, body: Any, condition: Any, constants: tuple[int, int], low: bool) -> None:
        """Adds the functions of a ``while``, and what one iteration gives the next; `constants`: of each function."""
        for function, count in zip((condition, body), constants, strict=True):
            self._join(function.invars[count:], body.outvars)
            self._visit(function, low)


_CALLS = frozenset(
    ("call", "checkpoint", "composite", "custom_jvp", "custom_vjp", "custom_vmap", "linear_call", "shard_map")
)
