"""Functionalize functions that mutate their arguments: modules and optimizers of `flax.nnx`.

Tracing must not write tracers into objects of the caller.  So the objects are split into a graph definition and arrays,
merged inside the traced function, and updated with the arrays that it returns.
"""

from __future__ import annotations

import sys
from typing import Any

import jax


def functionalize(function: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, Any], Any] | None:
    """Turns a call that may mutate nnx objects into a pure one; None if no argument contains such an object.

    Returns:
        A function of the objects' state and the other arguments; these two; and a function that takes its result,
        writes the new state to the objects and returns the result of `function`.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None

    def is_object(node: Any) -> bool:
        return isinstance(node, nnx.Pytree | nnx.Variable)

    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_object)
    indices = [index for index, leaf in enumerate(leaves) if is_object(leaf)]
    if not indices:
        return None
    objects = {str(index): leaves[index] for index in indices}
    graph, arrays = nnx.split(objects)
    others = [None if is_object(leaf) else leaf for leaf in leaves]

    def pure(arrays: Any, others: list[Any]) -> tuple[Any, Any]:
        merged = nnx.merge(graph, arrays)
        filled = list(others)
        for index in indices:
            filled[index] = merged[str(index)]
        positional, named = jax.tree.unflatten(tree, filled)
        out = function(*positional, **named)
        return out, nnx.state(merged)

    pure.graph = graph  # type: ignore[attr-defined]  # what a compiled program depends on, besides types

    def finish(result: tuple[Any, Any]) -> Any:
        out, state = result
        nnx.update(objects, state)
        return out

    return pure, (arrays, others), finish
