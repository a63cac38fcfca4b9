"""Tensor creation against PyTorch on the CPU."""

from __future__ import annotations

import pytest
import torch
from harness import check_rows, row, sample, tables

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

WINDOWS = [
    *(
        row("kaiser_window", "f", lambda d, n=n: (n,), dtype=dtype)
        for n, dtype in ((1, torch.float32), (8, torch.float32), (9, torch.float64))
    ),
    *(row("kaiser_window.periodic", "f", lambda d, n=n: (n, False), atol=1e-6) for n in (1, 2, 9)),
    row("kaiser_window.beta", "f", lambda d: (9, False, 5.0)),
]


@pytest.mark.filterwarnings("ignore:torch.range is deprecated:UserWarning")
@tables(filled=FILLED, progressions=PROGRESSIONS, windows=WINDOWS)
def test_rows(rows):
    check_rows(rows)
