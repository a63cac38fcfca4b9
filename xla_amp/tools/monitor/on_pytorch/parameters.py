"""Sums over gradients, weights and updates of each layer in a step of the optimizer; on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from xla_amp.common.types import VALUE_KINDS, ValueKind
from xla_amp.tools.monitor.history import ValueKey
from xla_amp.tools.monitor.on_pytorch import columns
from xla_amp.tools.monitor.on_pytorch.statistics import FIELDS, tensor_sums


class Parameters:
    """What a step of the optimizer shows of the parameters of each layer.

    Args:
        owned: path of a layer -> its own parameters.
        kinds: what is wanted of them.
        device: of the parameters.
    """

    def __init__(
        self, owned: Mapping[str, Sequence[torch.nn.Parameter]], kinds: Sequence[ValueKind], device: torch.device
    ) -> None:
        self._owned, self._device = owned, device
        self._kinds = [kind for kind in VALUE_KINDS[1:] if kind in kinds and owned]
        self._found: dict[ValueKind, torch.Tensor] = {}
        self._old: list[torch.Tensor] = []

    def keys(self) -> list[ValueKey]:
        """What the lines of `sums` are."""
        return [ValueKey(path, kind) for kind in self._kinds for path in self._owned]

    def add_gradients(self, zero: float, unscale: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Takes the gradients as they are now; arguments as in `tensor_sums`."""
        if "gradient" in self._kinds:
            gradients = [_gradients(own) for own in self._owned.values()]
            self._found["gradient"] = self._by_layer(gradients, zero, unscale, scale)

    def add_weights(self, zero: float) -> None:
        """Takes the weights before the step."""
        if "weight" in self._kinds:
            self._found["weight"] = self._by_layer(list(self._owned.values()), zero)
        if "update" in self._kinds:
            self._old = [p.detach().clone() for own in self._owned.values() for p in own]

    def add_updates(self, zero: float, skipped: torch.Tensor) -> None:
        """Takes the difference to the weights before, which is zero if the step is skipped."""
        old, self._old = self._old, []
        if not old:
            return
        changes = iter(torch._foreach_sub([p.detach() for own in self._owned.values() for p in own], old))
        update = self._by_layer([[next(changes) for _ in own] for own in self._owned.values()], zero)
        # An optimizer whose skipped step is undone afterwards has no update.
        nothing = torch.cat([torch.zeros_like(update[:, :-1]), update[:, -1:]], 1)
        self._found["update"] = torch.where(skipped != 0, nothing, update)

    def sums(self) -> list[torch.Tensor]:
        """float32 (layers, fields) of each kind, in the order of `keys`."""
        found, self._found = self._found, {}
        return [found[kind] for kind in self._kinds]

    def _by_layer(
        self,
        tensors: Sequence[Sequence[torch.Tensor]],
        zero: float,
        unscale: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(layers, fields): the sums of each layer's tensors; zeros for a layer without."""
        present = [index for index, own in enumerate(tensors) if own]
        if not present:
            return torch.zeros((len(tensors), FIELDS), device=self._device)
        flat = [(place, tensor.detach()) for place, index in enumerate(present) for tensor in tensors[index]]
        sums = tensor_sums([tensor for _, tensor in flat], [place for place, _ in flat], zero, unscale, scale)
        return columns.spread(sums, present, len(tensors))


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of those that have one; of a sparse gradient the values that it stores."""
    found = [p.grad.detach() for p in parameters if p.grad is not None]
    return [torch.ops.aten._values(each) if each.is_sparse else each for each in found]


def gradient_norm(optimizer: torch.optim.Optimizer, unscale: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """float32 (): 2-norm of all gradients, times `unscale`."""
    gradients = _gradients(p for group in optimizer.param_groups for p in group["params"])
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm if unscale is None else norm * unscale
