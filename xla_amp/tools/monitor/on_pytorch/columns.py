"""Which values a monitor records, and which tensors hold them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from xla_amp.backends.trees import tree_leaves
from xla_amp.errors import XlaAmpError
from xla_amp.policy import module_patterns


class LayerError(XlaAmpError, ValueError):
    """A pattern that selects no layer of the model."""


def selected(model: torch.nn.Module, patterns: str | Iterable[str]) -> dict[str, torch.nn.Module]:
    """Path -> module for the modules that a pattern reaches, each module once.

    Raises:
        LayerError: a pattern reaches none.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    found: dict[str, torch.nn.Module] = {}
    modules = dict(model.named_modules())
    unused = set(patterns)
    for path, module in modules.items():
        reaching = [pattern for pattern in patterns if module_patterns.selects(pattern, path)]
        unused.difference_update(reaching)
        if reaching:
            found[path] = module
    for pattern in patterns:
        if pattern in unused:
            raise LayerError(
                f"monitor(layers={pattern!r}): no module matches{module_patterns.nearest(pattern, modules)}"
            )
    return found


def parameters_of(
    layers: dict[str, torch.nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, list[torch.nn.Parameter]]:
    """Path -> the parameters that `optimizer` updates and the module has itself; each parameter once."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found: dict[str, list[torch.nn.Parameter]] = {}
    for path, module in layers.items():
        own = [p for p in module.parameters(recurse=False) if id(p) in updated and p.is_floating_point()]
        if own:
            found[path] = own
            updated.difference_update(map(id, own))
    return found


def floating(output: Any) -> list[torch.Tensor]:
    """The floating tensors of what a module returned."""
    return [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided
    ]


class Seen:
    """Tensors that were recorded since `clear`, so that a container's result that is its last part's counts once."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def new(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Those that were not seen."""
        for tensor in tensors:
            known = self._seen.get(id(tensor))
            if known is None or known() is not tensor:
                self._seen[id(tensor)] = weakref.ref(tensor)
                yield tensor

    def clear(self) -> None:
        """Forgets all."""
        self._seen.clear()


def spread(rows: torch.Tensor, present: Sequence[int], total: int) -> torch.Tensor:
    """(total, fields): row i of `rows` at ``present[i]``, zeros elsewhere."""
    if list(present) == list(range(total)):
        return rows
    at = {place: index for index, place in enumerate(present)}
    nothing = torch.zeros_like(rows[0])
    return torch.stack([rows[at[place]] if place in at else nothing for place in range(total)])


def joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(layers, fields): the sums over the values of both."""
    return torch.cat([torch.maximum(one[:, :1], other[:, :1]), one[:, 1:] + other[:, 1:]], 1)
