"""Containers that torch knows, those that libraries register with it included, such as the outputs of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a container, in order."""
    leaves, _ = tree_flatten(tree)
    return leaves


def tree_unflatten(leaves: Iterable[Any], structure: Any) -> Any:
    """A container of a structure that `tree_flatten` returned."""
    return structure.unflatten(leaves)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """A container with the results of a function of each leaf."""
    leaves, structure = tree_flatten(tree)
    return structure.unflatten(map(function, leaves))


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree_map` that leaves other leaves than those of one class as they are."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, tree)


def keystr(path: Sequence[Any]) -> str:
    """How Python gets to a leaf: the path that `tree_flatten_with_path` gives, as in ``['a'][0]``."""
    return "".join(map(str, path))
