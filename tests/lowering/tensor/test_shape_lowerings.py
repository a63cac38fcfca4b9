"""Creating, joining, slices written back, windows, padding against PyTorch on the CPU: edges, sums of half types."""

from __future__ import annotations

import math

import pytest
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


FILLED = [
    row("full", "f", lambda d: ([4], 2**40 + 1)),
    row("fill.Scalar", "t", lambda d: (sample(3, dtype=d), 2)),
    row("fill.Tensor", "fb", lambda d: (sample(3, dtype=d), torch.tensor(1.7))),
    row("zero", "fi", lambda d: (sample(3, dtype=d),)),
]

KINDS = (torch.float32, torch.float64, torch.bfloat16)
PROGRESSIONS = [
    *(row("arange", "f", lambda d, end=end: (end,)) for end in (5, 2.5, 0)),
    *(row("arange", "f", lambda d: (300,), dtype=dtype) for dtype in KINDS),
    row("arange.start", "f", lambda d: (2**40, 2**40 + 3)),
    *(row("arange.start_step", "f", lambda d, a=a: a) for a in ((10, 1, -3), (0.0, 1.0, 0.1))),
    row("range", "f", lambda d: (1, 4)),
    row("range.step", "f", lambda d: (0.0, 1.0, 0.25)),
]

KAISER = [
    *(
        row("kaiser_window", "f", lambda d, n=n: (n,), dtype=dtype)
        for n, dtype in ((1, torch.float32), (8, torch.float32), (9, torch.float64))
    ),
    *(row("kaiser_window.periodic", "f", lambda d, n=n: (n, False), atol=1e-6) for n in (1, 2, 9)),
    row("kaiser_window.beta", "f", lambda d: (9, False, 5.0)),
]


@pytest.mark.filterwarnings("ignore:torch.range is deprecated:UserWarning")
@tables(moved=MOVED, windows=WINDOWS, padding=PADDING, filled=FILLED, progressions=PROGRESSIONS, kaiser=KAISER)
def test_rows(rows):
    check_rows(rows)
