"""Running a function with its conditionals as selects: all branches run, and none is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import jax

from xla_amp.jax import compat

_Handler: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], list[Any]]


def without_conditionals(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns, computed without a conditional, save those inside of loops.

    All branches of each conditional run: right for branches that cost little.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    outs = _run(closed, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _run(closed: Any, values: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *values), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, compat.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        handler = _HANDLERS.get(eqn.primitive.name)
        with compat.equation(eqn):
            outs = handler(operands, eqn.params) if handler else compat.bind(eqn.primitive, operands, eqn.params)
        known.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def _select(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    which, *rest = operands
    results = [_run(branch, rest) for branch in params["branches"]]
    return [jax.lax.select_n(which, *cases) for cases in zip(*results, strict=True)]


def _inline(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    return _run(params["jaxpr"], operands)


_HANDLERS: Final[Mapping[str, _Handler]] = MappingProxyType({"cond": _select, "jit": _inline, "pjit": _inline})
"""Primitive -> what is done instead of binding it."""
