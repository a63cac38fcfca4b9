"""Arguments that a function changes in place: modules and optimizers of `flax.nnx`.

A function that is traced as a whole must not write what the trace made into objects of its caller: the objects are
split into a description and arrays, put together again inside, and updated with what comes out.
"""

from __future__ import annotations

import sys
from typing import Any

import jax


def lift(function: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, Any], Any] | None:
    """How to call a function with such arguments by arrays alone; None where there are none.

    Returns:
        A function of the objects' state and the other arguments, these two, and what takes its result, puts the new
        state into the objects and gives the function's own result.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None

    def is_object(node: Any) -> bool:
        return isinstance(node, nnx.Pytree | nnx.Variable)

    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_object)
    places = [place for place, leaf in enumerate(leaves) if is_object(leaf)]
    if not places:
        return None
    objects = {str(place): leaves[place] for place in places}
    graph, arrays = nnx.split(objects)
    others = [None if is_object(leaf) else leaf for leaf in leaves]

    def pure(arrays: Any, others: list[Any]) -> tuple[Any, Any]:
        inside = nnx.merge(graph, arrays)
        filled = list(others)
        for place in places:
            filled[place] = inside[str(place)]
        given, named = jax.tree.unflatten(tree, filled)
        out = function(*given, **named)
        return out, nnx.state(inside)

    def finish(result: tuple[Any, Any]) -> Any:
        out, after = result
        nnx.update(objects, after)
        return out

    return pure, (arrays, others), finish
