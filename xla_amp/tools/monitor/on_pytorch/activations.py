"""Sums over what the layers return, of the step so far; on the device."""

from __future__ import annotations

import torch

from xla_amp.tools.monitor.history import Key
from xla_amp.tools.monitor.on_pytorch import columns, ring
from xla_amp.tools.monitor.on_pytorch.statistics import FIELDS, tensor_sums


class Activations:
    """One line of sums for each layer that returned something."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.sums: torch.Tensor | None = None
        """float32 (layers, fields), of all passes of the step that `fold` has taken."""
        self._lines: dict[str, int] = {}
        """Path of a layer -> its line in `sums`."""
        self._pass: dict[str, torch.Tensor] = {}
        """The same of the forward pass that runs."""
        self._seen = columns.Seen()

    def keys(self) -> list[Key]:
        """What the lines are."""
        return [Key(path, "activation") for path in self._lines]

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
        for path in found:
            self._lines.setdefault(path, len(self._lines))
        places = [self._lines[path] for path in found]
        order = sorted(range(len(places)), key=places.__getitem__)
        sums = torch.cat(list(found.values()))
        if order != list(range(len(order))):
            sums = sums[torch.tensor(order)]
        sums = columns.spread(sums, sorted(places), len(self._lines))
        if self.sums is None or len(self.sums) < len(self._lines):
            [grown] = ring.zeros([(len(self._lines), FIELDS)], torch.float32, self._device)
            if self.sums is not None:
                grown[: len(self.sums)].copy_(self.sums)
            self.sums = grown
        self.sums.copy_(columns.joined(self.sums, sums))

    def begin_step(self) -> None:
        """Sets the step's sums to zero."""
        if self.sums is not None:
            self.sums.zero_()

    @torch.no_grad()
    def drop(self) -> None:
        """Forgets a step that failed."""
        self._pass.clear()
        self._seen.clear()
        self.begin_step()
