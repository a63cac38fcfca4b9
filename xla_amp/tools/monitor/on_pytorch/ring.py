"""The ring buffer: rows of the last sampled steps, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from xla_amp.backends import base
from xla_amp.tools.monitor.history import Key
from xla_amp.tools.monitor.on_pytorch import reads
from xla_amp.tools.monitor.on_pytorch.statistics import FIELDS
from xla_amp.types import Dtype


class Rows(NamedTuple):
    """The ring buffer on its way to the host."""

    keys: Sequence[Key]
    """What the lines of a row are, after the first, which is the step's status."""
    low: Dtype
    read: base.Read | None
    """float32 (rows, lines, fields), a row that was never written is zero; None if there are none."""


class Ring:
    """float32 (rows, lines, fields) and the number of rows written, both on the device.

    The device counts, so that a replay of a captured step, which runs no Python, writes the next row.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._size, self._device = rows, device
        [self._written] = zeros([(1,)], torch.int64, device)
        self._rows: torch.Tensor | None = None
        self._keys: Sequence[Key] = ()

    def append(
        self, status: torch.Tensor, sums: Sequence[torch.Tensor], keys: Sequence[Key], low: Dtype
    ) -> Rows | None:
        """Writes a row; returns the rows before it if they have other lines, which end with it.

        Args:
            status: float32 (at most fields), the row's first line.
            sums: float32 (lines, fields) each.
            keys: what the lines of `sums` are.
            low: low dtype of the rows before.
        """
        first = torch.cat([status, status.new_zeros(FIELDS - len(status))]).reshape(1, FIELDS)
        row = torch.cat([first, *sums])
        outgrown = None
        if self._rows is None or self._rows.shape[1] != len(row):
            outgrown = None if self._rows is None else self.read(low)
            [self._rows] = zeros([(self._size, *row.shape)], torch.float32, self._device)
            self._keys = keys
        self._rows.index_copy_(0, self._written % self._size, row.unsqueeze(0))
        self._written.add_(1)
        return outgrown

    def read(self, low: Dtype) -> Rows:
        """Starts to read all rows."""
        return Rows(self._keys, low, None if self._rows is None else reads.read_later(self._rows, overwritten=True))


def zeros(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """State on the device, made outside of the step, so that the first step is the program of the next ones."""
    likes = [torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in shapes]
    return base.zeros_like(likes, device)
