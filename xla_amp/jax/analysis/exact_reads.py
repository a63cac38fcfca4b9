"""Which values of a jaxpr are read only by what must see them unrounded: comparisons, roundings, results.

XLA sums a product of low operands in float32.  A low result rounds the sums: a count of 751 becomes 752, and the number
that it is compared with as well.  So where only comparisons, roundings, conversions to integers, sorts, the host or the
caller read a product, also after its elements were moved or picked, its result keeps float32.

The analysis visits each jaxpr once: what it rounds, and which arguments its results pass on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp

from xla_amp.analysis.value_graph import reached
from xla_amp.jax import compat
from xla_amp.jax.analysis.jaxprs import Inside, inside_of, nodes, per_jaxpr


class _Reads(NamedTuple):
    """How values are read."""

    rounded: set[Any]
    """What an operation reads that may round it."""
    passed: dict[Any, Iterable[Any]]
    """Value -> the values whose elements it holds."""
    read: set[Any]
    """What anything reads."""

    def behind(self, values: Iterable[Any]) -> set[Any]:
        """Values, and all whose elements they hold."""
        found = set(values)
        return found | reached(found & self.passed.keys(), lambda value: self.passed.get(value, ()))


def exact_values(jaxpr: Any, exact: Sequence[bool] | None) -> frozenset[Any]:
    """The variables of a jaxpr that only exact reads reach.

    `exact`: which of its results are read so; None for all.
    """
    reads, results = _reads(jaxpr), [] if exact is None else _not(jaxpr.outvars, exact)
    return frozenset(reads.read - reads.behind((*reads.rounded, *results)))


def exact_results_of_body(eqn: Any, exact: Sequence[bool]) -> tuple[bool, ...]:
    """For each result of the body of ``scan`` or ``while``, whether only exact reads reach it.

    `exact`: which results of the loop are read so.
    """
    inside = inside_of(eqn)
    reads = _reads_inside(inside)
    rounded = reads.behind((*reads.rounded, *_not(eqn.outvars, exact)))
    return tuple(isinstance(atom, compat.Literal) or atom not in rounded for atom in inside.jaxprs[-1].outvars)


_WIDE: Final = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float64))


def _not(atoms: Sequence[Any], exact: Sequence[bool]) -> list[Any]:
    return compat.variables(atom for atom, flag in zip(atoms, exact, strict=True) if not flag)


@per_jaxpr
def _reads(jaxpr: Any) -> _Reads:
    given = nodes(jaxpr)
    found = _Reads(set(), {}, set(compat.variables(jaxpr.outvars)).union(*[node.reads for node in given]))
    for node in given:
        row, outs = node.row, node.eqn.outvars
        if node.inside and (inside := inside_of(node.eqn)).jaxprs:
            reads = _reads_inside(inside)
            found.rounded.update(reads.behind(reads.rounded) & node.reads)
            found.passed.update((out, reads.behind((out,)) & node.reads) for out in outs)
        elif row.picks or row.kind == "data_movement" or (row.kind == "conversion" and outs[0].aval.dtype in _WIDE):
            found.passed.update(dict.fromkeys(outs, node.reads))
        elif not (row.exact or (row.kind == "conversion" and not jnp.issubdtype(outs[0].aval.dtype, jnp.inexact))):
            found.rounded.update(node.reads)
    return found


def _reads_inside(inside: Inside) -> _Reads:
    """How the values in the jaxprs of an equation are read, and its operands and results."""
    rounded, passed = set[Any](), dict[Any, Iterable[Any]]()
    for jaxpr in inside.jaxprs:
        reads = _reads(jaxpr)
        rounded |= reads.rounded
        passed.update(reads.passed)
    for value, held in inside.holds:
        passed[value] = (*passed.get(value, ()), held)
    return _Reads(rounded, passed, set())
