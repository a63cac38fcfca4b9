"""Which ``while`` loops end when floats that they compute have become small (`xla_amp.analysis.loop_graph`)."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from xla_amp.analysis.loop_graph import LoopGraph
from xla_amp.jax import compat
from xla_amp.jax.analysis.jaxprs import Node, inside_of, nodes, per_jaxpr, runs_low
from xla_amp.policy import Policy


def ends_by_floats(eqn: Any, policy: Policy) -> bool:
    """Whether the end of a ``while`` depends on a comparison of floats that low operations would change."""
    condition, body = (eqn.params[name].jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
    return _ends_by_floats(body, condition, policy)


@per_jaxpr
def _ends_by_floats(body: Any, condition: Any, policy: Policy) -> bool:
    inside = _Values(policy)
    for jaxpr in (condition, body):
        inside.add(jaxpr, low=True)
        for value, held in zip(reversed(jaxpr.invars), reversed(body.outvars), strict=False):
            if not isinstance(held, compat.Literal):
                inside.sources[value].append(held)  # of the iteration before
    return inside.ends_by_floats(compat.variables(condition.outvars))


@per_jaxpr
def solves(jaxpr: Any, policy: Policy) -> bool:
    """Whether a jaxpr contains a loop that `ends_by_floats`."""
    return any(
        (node.row.kind == "while" and ends_by_floats(node.eqn, policy))
        or any(solves(inner, policy) for inner in node.inside)
        for node in nodes(jaxpr)
        if node.inside
    )


def _is_float(atom: Any) -> bool:
    return bool(jnp.issubdtype(getattr(atom.aval, "dtype", np.bool_), jnp.inexact))


class _Values(LoopGraph[Any]):
    """The values of jaxprs; what is passed to a jaxpr from several places is one value there."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(_is_float)
        self._policy = policy
        self._seen: set[tuple[Any, bool]] = set()

    def add(self, jaxpr: Any, low: bool) -> None:
        """Adds a jaxpr and those inside of it; `low`: whether what is inside may be low."""
        if (jaxpr, low) not in self._seen:
            self._seen.add((jaxpr, low))
            for node in nodes(jaxpr):
                self._add(node, low)

    def _add(self, node: Node, low: bool) -> None:
        eqn, kind = node.eqn, node.row.kind
        if node.inside and (inside := inside_of(eqn)).jaxprs:
            low = low and not (kind == "while" and ends_by_floats(eqn, self._policy))
            for value, held in (*inside.holds, *itertools.product(eqn.outvars, inside.deciding)):
                self.sources[value].append(held)
            for jaxpr in inside.jaxprs:
                self.add(jaxpr, low)
            return
        self.sources.update((variable, list(node.reads)) for variable in eqn.outvars)
        if low and runs_low(eqn, self._policy):
            self.low.update(eqn.outvars)
        if kind == "conversion" or node.row.exact:
            compared = (v for v in eqn.outvars if kind == "conversion" or v.aval.dtype == np.bool_)
            self.comparisons.update(itertools.filterfalse(_is_float, compared))
