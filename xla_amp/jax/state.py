"""Arguments that a function changes in place: modules and optimizers of `flax.nnx`.

A function that is traced as a whole must not write what the trace made into objects of its caller: the objects are
split into a description and arrays, put together again inside, and updated with what comes out.
"""

from __future__ import annotations

import sys
from typing import Any


def lift(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any] | None:
    """How to call a function with such arguments by arrays alone; None where there are none.

    Returns:
        A function of a state, the state, and what puts the results back into the arguments.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not _has_objects(nnx, (args, kwargs)):
        return None
    graph, arrays = nnx.split((args, kwargs))

    def pure(arrays: Any) -> Any:
        given, named = nnx.merge(graph, arrays)
        out = function(*given, **named)
        return out, nnx.state((given, named))

    def finish(result: Any) -> Any:
        out, after = result
        nnx.update((args, kwargs), after)
        return out

    return pure, arrays, finish


def _has_objects(nnx: Any, tree: Any) -> bool:
    import jax

    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree | nnx.Variable))
    return any(isinstance(leaf, nnx.Pytree | nnx.Variable) for leaf in leaves)
