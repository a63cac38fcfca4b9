"""Joining, slices written back, windows and padding against PyTorch on the CPU: edges, and sums of half types.

Ordinary calls are those of torch's operator database (tests/lazy/op_db).
"""

from __future__ import annotations

import math

import torch
from harness import check_rows, row, sample, tables

aten = torch.ops.aten


def block(dtype: torch.dtype) -> torch.Tensor:
    return sample(3, 4, 5, dtype=dtype)


def other(dtype: torch.dtype) -> torch.Tensor:
    return sample(3, 2, 5, dtype=dtype, seed=1)


SLICES = ((-3, 100, 2), (1, 2**62, 3), (3, 1, 1))

MOVED = [
    row("cat", "fbit", lambda d: ([block(d), other(d), torch.zeros(0, dtype=d)], 1)),
    row("cat", "fbi", lambda d: ([block(d), other(torch.float64)], -2)),
    row("cat", "f", lambda d: ([torch.zeros(0), torch.zeros(0)],)),
    row("stack", "i", lambda d: ([block(d), block(torch.float32)], -1)),
    row("_stack", "f", lambda d: ([block(d), block(d)],)),
    *(
        row("slice_backward", "fb", lambda d, s=s: (aten.slice(block(d), 1, *s).contiguous(), [3, 4, 5], 1, *s))
        for s in SLICES
    ),
    *(
        row("slice_scatter", "ft", lambda d, s=s: (block(d), torch.ones_like(aten.slice(block(d), 1, *s)), 1, *s))
        for s in SLICES
    ),
]

# torch sums overlapping windows in bfloat16 itself, the lowerings in float32: compared with the float64 result.
UNROLLED = (([2, 3], [1, 1], [0, 0], [1, 1]), ([3, 3], [2, 1], [1, 2], [2, 1]))


def image(dtype: torch.dtype) -> torch.Tensor:
    return sample(2, 3, 6, 7, dtype=dtype)


WINDOWS = [
    *(row("col2im", "b", lambda d, a=a: (aten.im2col(image(d), *a), [6, 7], *a), wide=True) for a in UNROLLED),
    row("col2im", "f", lambda d: (aten.im2col(image(d)[0], *UNROLLED[1]), [6, 7], *UNROLLED[1])),
]

SHAPE, AMOUNTS = (1, 2, 4, 5, 6), (2, 1, 0, 3, 1, 2)

PADDING = [
    row("constant_pad_nd", "ft", lambda d: (block(d), [-1, -1, 1, 0, 0, 2])),
    row("constant_pad_nd", "fb", lambda d: (block(d), [1, 1], -math.inf)),
    *(
        row(
            f"{kind}_pad3d_backward",
            "b",
            lambda d: (sample(1, 2, 7, 8, 9, dtype=d), sample(*SHAPE, dtype=d), AMOUNTS),
            wide=True,
        )
        for kind in ("reflection", "replication")
    ),
    *(row(f"{kind}_pad1d", "f", lambda d: (sample(2, 3, 6), (-1, 2))) for kind in ("reflection", "replication")),
    row("replication_pad1d_backward", "f", lambda d: (sample(2, 3, 7), sample(2, 3, 6), (-1, 2))),
]


@tables(moved=MOVED, windows=WINDOWS, padding=PADDING)
def test_rows(rows):
    check_rows(rows)
