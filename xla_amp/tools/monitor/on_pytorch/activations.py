"""Sums over what the layers return, of the step so far; on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from xla_amp.backends import base
from xla_amp.tools.monitor.history import ValueKey
from xla_amp.tools.monitor.on_pytorch import columns
from xla_amp.tools.monitor.on_pytorch.statistics import FIELDS, tensor_sums


class Activations:
    """One line of sums for each layer, which is of size 0 if the layer has returned nothing.

    Args:
        layers: their paths.
        device: of the model.
    """

    def __init__(self, layers: Iterable[str], device: torch.device) -> None:
        self._device = device
        self._layers = list(layers)
        """In the order in which they return; those that have not come last."""
        self._returned: dict[str, None] = {}
        [self.sums] = zeros([(len(self._layers), FIELDS)], torch.float32, device)
        """float32 (layers, fields), of all passes of the step that `fold` has taken."""
        self._pass: dict[str, torch.Tensor] = {}
        """Layer -> the sums of the forward pass that runs."""
        self._seen = columns.Seen()

    def keys(self) -> list[ValueKey]:
        """What the lines are."""
        return [ValueKey(path, "activation") for path in self._layers]

    def new(self, output: object) -> list[torch.Tensor]:
        """The floating tensors of what a module returned that no module inside it has returned."""
        return list(self._seen.new(columns.floating(output)))

    @torch.no_grad()
    def add(self, path: str, tensors: list[torch.Tensor], zero: float) -> None:
        """Adds results of the layer at `path`; `zero` as in `tensor_sums`."""
        sums = tensor_sums([tensor.detach() for tensor in tensors], [0] * len(tensors), zero)
        before = self._pass.get(path)
        self._pass[path] = sums if before is None else columns.joined(before, sums)

    def fold(self) -> None:
        """Adds the forward passes since the last call to the step's sums."""
        found, self._pass = self._pass, {}
        self._seen.clear()
        if not found:
            return
        if not found.keys() <= self._returned.keys():
            self._returned.update(dict.fromkeys(found))
            self._layers = [*self._returned, *(path for path in self._layers if path not in self._returned)]
        nothing = torch.zeros((1, FIELDS), device=self._device)
        self.sums.copy_(columns.joined(self.sums, torch.cat([found.get(path, nothing) for path in self._layers])))

    def begin_step(self) -> None:
        """Sets the step's sums to zero."""
        self.sums.zero_()

    @torch.no_grad()
    def drop(self) -> None:
        """Forgets a step that failed."""
        self._pass.clear()
        self._seen.clear()
        self.begin_step()


def zeros(shapes: Iterable[Iterable[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """State on the device, made outside of the step, so that the first step is the program of the next ones."""
    return base.zeros_like([torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in shapes], device)
