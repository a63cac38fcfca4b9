"""Sums over the operands of 8-bit products, of the step so far; on the device."""

from __future__ import annotations

from typing import Any

import torch

from xla_amp.lowering.linalg.float8 import FORMATS
from xla_amp.pytorch.recorder import ring
from xla_amp.pytorch.recorder.statistics import FIELDS, add_float8_sums
from xla_amp.recorder.history import Key


class Float8Operands:
    """One line of sums for each layer and 8-bit format.

    Each operand is added at once: backward passes have no end that a hook sees, and a replay of a captured micro-batch
    runs no Python.
    """

    def __init__(self, kinds: tuple[str, ...], device: torch.device) -> None:
        self._kinds, self._device = kinds, device
        self.sums: dict[Key, torch.Tensor] = {}
        """float32 (1, fields) each; a new layer does not change the tensors of the others, nor their program."""

    @torch.no_grad()
    def add(self, path: str, operand: torch.Tensor, format: Any, contracted: int, scaling: str) -> None:
        """Adds a matrix that a product of the layer at `path` reads in 8 bits; arguments as in `add_float8_sums`."""
        kind: Any = FORMATS[format].dtype.name
        if kind not in self._kinds:
            return
        key = Key(path, kind)
        total = self.sums.get(key)
        if total is None:
            [total] = ring.zeros([(1, FIELDS)], torch.float32, self._device)
            self.sums[key] = total
        total.copy_(add_float8_sums(total, operand.detach(), format, contracted, scaling))

    @torch.no_grad()
    def begin_step(self) -> None:
        """Sets the step's sums to zero."""
        for total in self.sums.values():
            total.zero_()
