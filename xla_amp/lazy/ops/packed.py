"""Packed sequences as padded ones whose lengths are data: one program for each padded shape.

``PackedSequence.data`` has as many rows as the lengths add up to, and XLA compiles for fixed shapes: a program that has
these rows is another one for each sum.  So `pack_padded_sequence` and the recurrent layers (`rnn`) return a tensor of
that honest shape whose value is not recorded (`PackedRows`).  Layers and `pad_packed_sequence` find the padded value
behind it and record that alone; gradients go the same way back.  Another operation that reads the rows records them,
and is warned of once its count of rows changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from xla_amp.common import events
from xla_amp.errors import RecompileWarning
from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph.trace import Buffer, spec
from xla_amp.lazy.ops.checks.meta_results import SHAPES
from xla_amp.lazy.ops.composites import is_transformed
from xla_amp.lazy.ops.operators import KernelTable, on_key
from xla_amp.lazy.tensors import tensor_io, transfer

aten = torch.ops.aten
KERNELS = KernelTable()
"""ATen name -> function for tensors of the device, with or without gradients."""
_library = torch.library.Library("xla_amp", "FRAGMENT")
_library.define("packed_rows(Tensor padded, Tensor lengths, int rows) -> Tensor")
_library.define("padded_rows(Tensor rows, Tensor lengths, int steps) -> Tensor")
_packed_rows = torch.ops.xla_amp.packed_rows.default
_padded_rows = torch.ops.xla_amp.padded_rows.default
SHAPES[_packed_rows] = lambda padded, lengths, rows: padded.new_empty((rows, *padded.shape[2:]))
SHAPES[_padded_rows] = lambda rows, lengths, steps: rows.new_empty((steps, *lengths.shape, *rows.shape[1:]))
_composite_pack: Callable[..., Any] = on_key("_pack_padded_sequence", "CPU")  # torch's C++, as for each device
_composite_pad: Callable[..., Any] = on_key("_pad_packed_sequence", "CPU")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lengths:
    """The lengths of the sequences of a batch, in decreasing order."""

    batch_sizes: torch.Tensor
    """int64 on the CPU: how many sequences have each time step."""
    on_device: torch.Tensor
    """int64[batch]."""

    @classmethod
    def of(cls, batch_sizes: torch.Tensor) -> Lengths:
        """The lengths of a packed sequence."""
        return cls(batch_sizes=batch_sizes.clone(), on_device=transfer.to_device(_counted(batch_sizes)))

    @property
    def rows(self) -> int:
        """Their sum."""
        return int(self.batch_sizes.sum())

    def fit(self, padded: torch.Tensor, steps: int) -> torch.Tensor:
        """`padded` with `steps` time steps and zeros after the end of each sequence."""
        padded = padded[:steps]
        if missing := steps - len(padded):
            padded = torch.cat([padded, padded.new_zeros((missing, *padded.shape[1:]))])
        return self.fill(padded, 0)

    def fill(self, padded: torch.Tensor, value: float) -> torch.Tensor:
        """`padded` with `value` after the end of each sequence."""
        after = torch.arange(len(padded), device=padded.device)[:, None] >= self.on_device
        return padded.masked_fill(after.view(*after.shape, *(1,) * (padded.dim() - 2)), value)


def _counted(batch_sizes: torch.Tensor) -> torch.Tensor:
    """The lengths, int64[batch] on the CPU."""
    return (batch_sizes[:, None] > torch.arange(int(batch_sizes[0]))).sum(0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """The rows of a packed sequence, recorded when an operation reads them (`trace.Unrecorded`)."""

    padded: torch.Tensor
    """[time, batch, ...]; anything after the end of each sequence."""
    lengths: Lengths

    def record(self) -> int:
        """Records the rows; returns the number of the value."""
        count = self.lengths.rows
        _note(count)
        return tensor_io.read(_packed_rows(self.padded, self.lengths.on_device, count))[0]

    def converted(self, dtype: torch.dtype) -> torch.Tensor:
        """The rows in another dtype, not recorded either."""
        return _rows(self.padded.to(dtype), self.lengths)


def _rows(padded: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    shape = (lengths.rows, *padded.shape[2:])
    rows = private_api.create_tensor(shape, padded.dtype)
    storage: Any = rows.untyped_storage()
    storage._xla_amp = buffer = Buffer(spec(shape, padded.dtype))
    buffer.unrecorded = PackedRows(padded=padded, lengths=lengths)
    return rows


_counts: set[int] = set()
"""Counts of rows that programs have."""


def _note(rows: int) -> None:
    """Warns at the second count of rows."""
    if rows not in _counts and len(_counts) == 1:
        events.warn(
            "an operation reads the rows of a packed sequence (packed.data, or one packed on the CPU), which are "
            "as many as the lengths add up to: each sum makes another program. Pad instead: compute on the padded "
            "tensor of the device, before pack_padded_sequence and after pad_packed_sequence, and mask what is padding",
            RecompileWarning,
        )
    _counts.add(rows)


def _of(data: torch.Tensor, batch_sizes: torch.Tensor) -> PackedRows | None:
    """The padded value behind `data`, if its lengths are those of `batch_sizes`."""
    found: Any = tensor_io.unrecorded(data)
    return found if found is not None and torch.equal(found.lengths.batch_sizes, batch_sizes) else None


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        ctx.lengths, ctx.steps = lengths, len(padded)
        return _rows(padded.clone(), lengths)  # of the value now: values in the trace never change

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Unpack.apply(grad, ctx.lengths, ctx.steps), None  # type: ignore[no-untyped-call]


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, lengths: Lengths, steps: int) -> torch.Tensor:
        ctx.lengths = lengths
        if (rows := _of(data, lengths.batch_sizes)) is not None:
            return lengths.fit(rows.padded, steps)
        _note(len(data))
        padded: torch.Tensor = _padded_rows(data, lengths.on_device, steps)
        return padded

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Pack.apply(grad, ctx.lengths), None, None  # type: ignore[no-untyped-call]


def pack(padded: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """The rows of a packed sequence, [sum of lengths, ...], of a [time, batch, ...]."""
    rows: torch.Tensor = _Pack.apply(padded, lengths)  # type: ignore[no-untyped-call]
    return rows


def unpack(data: torch.Tensor, lengths: Lengths, steps: int) -> torch.Tensor:
    """[time, batch, ...] of the rows of a packed sequence, with zeros after the end of each sequence."""
    padded: torch.Tensor = _Unpack.apply(data, lengths, steps)  # type: ignore[no-untyped-call]
    return padded


def padded_shape(data: torch.Tensor, batch_sizes: torch.Tensor) -> tuple[Lengths, int]:
    """The lengths of a packed sequence, and the time steps of the padded tensor that it was packed from."""
    if (rows := _of(data, batch_sizes)) is not None:
        return rows.lengths, len(rows.padded)
    return Lengths.of(batch_sizes), len(batch_sizes)


def is_packed(data: torch.Tensor, batch_sizes: torch.Tensor) -> bool:
    """Whether these are the parts of a packed sequence, outside transforms of torch.func and of torch.compile."""
    return (
        not is_transformed(data)
        and type(data) in tensor_io.PLAIN
        and type(batch_sizes) is torch.Tensor
        and batch_sizes.device.type == "cpu"
        and batch_sizes.dim() == 1
        and data.dim() > 0
        and 0 < len(data) == int(batch_sizes.sum())
        and bool((batch_sizes[1:] <= batch_sizes[:-1]).all())
    )


@KERNELS.implements("_pack_padded_sequence")
def _pack_padded_sequence(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    given = lengths.tolist() if type(lengths) is torch.Tensor and lengths.device.type == "cpu" else []
    padded = input.transpose(0, 1) if batch_first and input.dim() > 1 else input
    fits = (
        not is_transformed(input)
        and type(input) in tensor_io.PLAIN
        and lengths.dtype is torch.int64
        and input.dim() > 1
        and 0 < len(given) == padded.shape[1]
        and given == sorted(given, reverse=True)
        and 0 < given[-1] <= given[0] <= len(padded)
    )
    if not fits:
        return _composite_pack(input, lengths, batch_first)  # which also raises torch's errors
    batch_sizes = (lengths > torch.arange(given[0])[:, None]).sum(1)
    found = Lengths(batch_sizes=batch_sizes.clone(), on_device=transfer.to_device(lengths))
    return pack(padded, found), batch_sizes


@KERNELS.implements("_pad_packed_sequence")
def _pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> Any:
    steps = total_length if total_length > 0 else len(batch_sizes)
    if steps < len(batch_sizes) or not is_packed(data, batch_sizes):
        return _composite_pad(data, batch_sizes, batch_first, padding_value, total_length)
    lengths, _ = padded_shape(data, batch_sizes)
    padded = unpack(data, lengths, steps)
    if padding_value:
        padded = lengths.fill(padded, padding_value)
    return padded.transpose(0, 1) if batch_first else padded, _counted(batch_sizes)
