"""Which values of a jaxpr are read only by what must see them unrounded: comparisons, roundings, results.

XLA sums a product of low operands in float32.  A low result rounds the sums: a count of 751 becomes 752, and the number
that it is compared with as well.  So where only comparisons, roundings, conversions to integers, sorts, the host or the
caller read a product, also after its elements were moved or picked, its result keeps float32.

The analysis visits each jaxpr once: what reads a value is summed up as the results of its jaxpr that it reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import jax.numpy as jnp

from xla_amp.jax import compat, rebind
from xla_amp.jax.jaxpr_analysis import Node, nodes, per_jaxpr
from xla_amp.jax.primitives import info

Reads: TypeAlias = frozenset[int] | None
"""The results that a value reaches unrounded, besides what reads it exactly; None if something else reads it, too."""

_EXACTLY: Final[Reads] = frozenset()


def exact_values(jaxpr: Any, exact: Sequence[bool] | None) -> frozenset[Any]:
    """The variables of a jaxpr that only exact reads reach.

    `exact`: which of its results are read so; None for all.
    """
    results = None if exact is None else {index for index, flag in enumerate(exact) if flag}
    found = _reads(jaxpr).items()
    return frozenset(v for v, reads in found if reads is not None and (results is None or reads <= results))


def exact_results_of_body(eqn: Any, exact: Sequence[bool]) -> tuple[bool, ...]:
    """For each result of the body of ``scan`` or ``while``, whether only exact reads reach it.

    `exact`: which results of the loop are read so.
    """
    loop = _LoopReads(eqn)
    reached = (loop.outside(frozenset({index})) for index in range(len(loop.body.outvars)))
    return tuple(reads is not None and all(exact[index] for index in reads) for reads in reached)


@per_jaxpr
def _reads(jaxpr: Any) -> Mapping[Any, Reads]:
    """What reads each variable of a jaxpr."""
    found: dict[Any, Reads] = {}
    for index, atom in enumerate(jaxpr.outvars):
        _add(found, atom, frozenset({index}))
    for node in reversed(nodes(jaxpr)):
        outs = [found.get(variable, _EXACTLY) for variable in node.eqn.outvars]
        reads = _of_operands(node, outs)
        if reads is None:
            found.update(dict.fromkeys(node.reads))
            continue
        for atom, each in zip(node.eqn.invars, reads, strict=True):
            _add(found, atom, each)
    return found


def _add(found: dict[Any, Reads], atom: Any, reads: Reads) -> None:
    if not isinstance(atom, compat.Literal):
        found[atom] = _both(found.get(atom, _EXACTLY), reads)


def _both(one: Reads, other: Reads) -> Reads:
    return None if one is None or other is None else one | other


def _all(reads: Sequence[Reads]) -> Reads:
    found = _EXACTLY
    for each in reads:
        found = _both(found, each)
    return found


def _of_operands(node: Node, outs: Sequence[Reads]) -> Sequence[Reads] | None:
    """What reads each operand of an equation through it, if `outs` reads its results; None if it rounds all."""
    eqn, row, count = node.eqn, node.row, len(node.eqn.invars)
    if row.kind in _INSIDE:
        return _INSIDE[row.kind](eqn, outs)
    if row.kind == "conversion":
        return [_of_conversion(eqn.outvars[0].aval.dtype, outs[0])] * count
    if row.exact:
        return [_EXACTLY] * count
    return [_all(outs)] * count if row.picks or row.kind == "data_movement" else None


def _of_conversion(dtype: Any, out: Reads) -> Reads:
    if not jnp.issubdtype(dtype, jnp.floating):
        return None if jnp.issubdtype(dtype, jnp.complexfloating) else _EXACTLY
    return out if jnp.dtype(dtype).itemsize >= 4 else None


def _of_arguments(jaxpr: Any, outs: Sequence[Reads]) -> list[Reads]:
    """What reads each argument of a jaxpr inside, if `outs` reads its results."""
    found = _reads(jaxpr)
    inside = [found.get(variable, _EXACTLY) for variable in jaxpr.invars]
    return [None if reads is None else _all([outs[index] for index in reads]) for reads in inside]


def _of_call(eqn: Any, outs: Sequence[Reads]) -> Sequence[Reads]:
    return _of_arguments(rebind.inner(eqn.params).jaxpr, outs)


def _of_cond(eqn: Any, outs: Sequence[Reads]) -> Sequence[Reads]:
    branches = [_of_arguments(branch.jaxpr, outs) for branch in eqn.params["branches"]]
    return [None, *map(_all, zip(*branches, strict=True))]


def _of_loop(eqn: Any, outs: Sequence[Reads]) -> Sequence[Reads]:
    return [None if r is None else _all([outs[index] for index in r]) for r in _LoopReads(eqn).operands()]


class _LoopReads:
    """``scan`` or ``while``: what reads its operands, and the results of its body, as results of the loop."""

    def __init__(self, eqn: Any) -> None:
        params, operands = eqn.params, list(range(len(eqn.invars)))
        self._condition: list[Reads] = []
        """What reads each operand of the condition."""
        if info(eqn.primitive.name).kind == "while":
            self.body = params["body_jaxpr"].jaxpr
            self._condition = _of_arguments(params["cond_jaxpr"].jaxpr, [_EXACTLY])
            of_condition, consts, carry = rebind.looped(params, operands)
        else:
            self.body = rebind.inner(params).jaxpr
            of_condition, (consts, carry, _) = [], rebind.scanned(params, operands)
        self._first, self._carried, self._own = len(of_condition), len(carry), len(consts)
        found = _reads(self.body)
        self._arguments = [found.get(variable, _EXACTLY) for variable in self.body.invars]

    def outside(self, reads: Reads) -> Reads:
        """The results of the loop that a value of the body reaches, in this iteration or a later one."""
        found, todo = set[int](), [reads]
        while todo:
            each = todo.pop()
            if each is None:
                return None
            todo += (self._carry(index) for index in each - found if index < self._carried)
            found |= each
        return frozenset(found)

    def _carry(self, index: int) -> Reads:
        """What reads a carried value in an iteration."""
        of_condition = self._condition[self._first + index] if self._condition else _EXACTLY
        return _both(of_condition, self._arguments[self._own + index])

    def operands(self) -> list[Reads]:
        """What reads each operand of the loop."""
        carry = [self.outside(frozenset({index})) for index in range(self._carried)]
        others = list(map(self.outside, self._arguments))
        first, last = others[: self._own], others[self._own + self._carried :]
        return [*self._condition[: self._first], *first, *carry, *last]


_INSIDE: Final[Mapping[str | None, Callable[[Any, Sequence[Reads]], Sequence[Reads]]]] = MappingProxyType(
    {
        **dict.fromkeys(("call", "checkpoint", "custom_jvp", "custom_vjp", "shard_map"), _of_call),
        "cond": _of_cond,
        "scan": _of_loop,
        "while": _of_loop,
    }
)
"""Kind of primitive -> what reads its operands through the jaxprs that it contains."""
