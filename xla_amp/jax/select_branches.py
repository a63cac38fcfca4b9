"""Convert conditionals to selects: all branches run, so the host of a GPU need not wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xla_amp.jax import rebind
from xla_amp.jax.primitives import info


def without_conditionals(function: Callable[..., Any], *args: Any) -> Any:
    """Evaluates ``function(*args)`` with each ``cond`` outside of loops replaced by a select.

    All branches of each conditional run: use it for cheap branches.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    outs = _eval(closed, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _eval(closed: Any, values: Sequence[Any]) -> list[Any]:
    return rebind.evaluate(closed, values, _process)


def _process(eqn: Any, operands: list[Any]) -> list[Any]:
    kind = info(eqn.primitive.name).kind
    if kind == "cond":
        index, *rest = operands
        results = [_eval(branch, rest) for branch in eqn.params["branches"]]
        return [jax.lax.select_n(index, *cases) for cases in zip(*results, strict=True)]
    return _eval(rebind.inner(eqn.params), operands) if kind == "call" else rebind.bind_as_written(eqn, operands)
