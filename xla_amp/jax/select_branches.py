"""Convert conditionals to selects: all branches run, so the host of a GPU need not wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import jax

from xla_amp.jax import compat

_Rule: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], list[Any]]


def without_conditionals(function: Callable[..., Any], *args: Any) -> Any:
    """Evaluates ``function(*args)`` with each ``cond`` outside of loops replaced by a select.

    All branches of each conditional run: use it for cheap branches.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    outs = _eval(closed, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _eval(closed: Any, values: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    environment: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *values), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, compat.Literal) else environment[atom]

    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        rule = _RULES.get(eqn.primitive.name)
        with compat.equation_context(eqn):
            outs = rule(operands, eqn.params) if rule else compat.bind(eqn.primitive, operands, eqn.params)
        environment.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def _select(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    index, *rest = operands
    results = [_eval(branch, rest) for branch in params["branches"]]
    return [jax.lax.select_n(index, *cases) for cases in zip(*results, strict=True)]


def _inline(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    return _eval(params["jaxpr"], operands)


_RULES: Final[Mapping[str, _Rule]] = MappingProxyType({"cond": _select, "jit": _inline, "pjit": _inline})
"""Primitive -> rule that replaces it."""
