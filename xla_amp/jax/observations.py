"""`observe`: marks on values of a training step.  The core makes them, and tools such as `monitor` read them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from xla_amp.common.types import VALUE_KINDS
from xla_amp.jax import compat

SCALARS: Final = ("loss", "loss_scale", "skipped")
"""What `observe` takes besides the kinds of values: numbers of the step."""

_PREFIX: Final = "xla_amp:observe"


class Mark(NamedTuple):
    """A mark on a value."""

    what: str
    """Of `xla_amp.common.types.VALUE_KINDS` or `SCALARS`."""
    layer: str
    """Path of the layer, with dots; empty for a number."""


def observe(what: str, tree: Any, *, layer: str = "") -> Any:
    """Marks values of a training step for `monitor`; returns `tree`, which the step must go on with.

    The layer of each leaf of gradients, weights and updates is its path in the tree, without the last name.  Without
    `monitor` this does nothing, and costs nothing.

    Args:
        what: ``"gradient"``, ``"weight"``, ``"update"`` or ``"activation"``; or ``"loss"``, ``"loss_scale"`` or
            ``"skipped"``, a number or `LossScale.value`.
        tree: the values.  Leaves that are no floating-point arrays are not recorded.
        layer: path of the layer, put before the paths of the leaves.

    Raises:
        ValueError: `what` is another name.

    Example:
        >>> def step(params, x):
        ...     grads = jax.grad(lambda params: jnp.sum(params["w"] @ x))(observe("weight", params))
        ...     return observe("gradient", grads)
    """
    if what not in (*VALUE_KINDS, *SCALARS):
        raise ValueError(f"observe({what!r}): expected one of {', '.join((*VALUE_KINDS, *SCALARS))}")

    def mark(path: Any, leaf: Any) -> Any:
        if what in SCALARS:
            return _marked(jnp.asarray(leaf), Mark(what, ""))
        if not compat.is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        names = [_name(part) for part in path]
        if isinstance(path[-1] if path else None, jax.tree_util.GetAttrKey) and names[-1] == "value":
            names.pop()  # of a variable of `flax.nnx`
        names = [name for name in (names if what == "activation" else names[:-1]) if name != "params"]
        return _marked(leaf, Mark(what, ".".join([*filter(None, [layer]), *names])))

    return jax.tree_util.tree_map_with_path(mark, tree)


def _marked(value: Any, mark: Mark) -> Any:
    return checkpoint_name(value, f"{_PREFIX}|{mark.what}|{mark.layer}")


def mark_of(eqn: Any) -> Mark | None:
    """The mark that an equation puts on its operand; None for any other equation."""
    name = eqn.params["name"] if eqn.primitive.name == "name" else ""
    return Mark(*name.split("|")[1:]) if name.startswith(f"{_PREFIX}|") else None


def _name(part: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)
