"""Tensor creation against PyTorch on the CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from harness import check_rows, lowering_of, row, sample, tables

FILLED = [
    row("full", "f", lambda d: ([2, 3], 1.7), dtype=torch.bfloat16),
    row("full", "f", lambda d: ([], True)),
    row("full", "f", lambda d: ([4], 2**40 + 1)),
    row("full_like", "f", lambda d: (sample(2, 3, dtype=d), 2.5), dtype=torch.int32),
    row("fill.Scalar", "fbit", lambda d: (sample(3, dtype=d), 2)),
    row("fill.Tensor", "fb", lambda d: (sample(3, dtype=d), torch.tensor(1.7))),
    row("scalar_tensor", "f", lambda d: (2.5,), dtype=torch.float64),
    row("zero", "fi", lambda d: (sample(3, dtype=d),)),
]

KINDS = (torch.float32, torch.float64, torch.bfloat16)
PROGRESSIONS = [
    *(row("arange", "f", lambda d, end=end: (end,)) for end in (5, 2.5, 0)),
    *(row("arange", "f", lambda d: (300,), dtype=dtype) for dtype in KINDS),
    row("arange.start", "f", lambda d: (1, 6)),
    row("arange.start", "f", lambda d: (0.5, 6)),
    row("arange.start", "f", lambda d: (2**40, 2**40 + 3)),
    *(row("arange.start_step", "f", lambda d, a=a: a) for a in ((10, 1, -3), (0.0, 1.0, 0.1), (0, 10, 3))),
    row("arange.start_step", "f", lambda d: (0, 10, 0.3), dtype=torch.float64),
    row("range", "f", lambda d: (1, 4)),
    row("range.step", "f", lambda d: (0.0, 1.0, 0.25)),
    *(row("linspace", "f", lambda d: (0.0, 1.0, 7), dtype=dtype) for dtype in KINDS),
    *(row("linspace", "f", lambda d, n=n: (-3, 2, n)) for n in (0, 1, 2)),
    *(row("linspace", "f", lambda d, n=n: (0, 10, n), dtype=torch.int64) for n in (4, 5)),
    *(row("logspace", "f", lambda d: (0.0, 2.0, 5), dtype=dtype) for dtype in KINDS),
    row("logspace", "f", lambda d: (0.0, 2.0, 5, 2.0)),
    *(
        row(f"{name}.{points}", "f", lambda d, points=points: (*ends(points), 5))
        for name in ("linspace", "logspace")
        for points in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    ),
]


def ends(points: str) -> list[torch.Tensor | float]:
    return [torch.tensor(float(i)) if kind == "Tensor" else float(i) for i, kind in enumerate(points.split("_"), 1)]


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


def test_a_long_range_is_computed_not_stored():
    out = jax.ShapeDtypeStruct((1_000_000,), np.dtype(np.int64))
    with jax.enable_x64(True):
        program = jax.jit(lambda: lowering_of("arange").function(1_000_000, out=out)).lower().as_text()
    assert "iota" in program
    assert len(program) < 2000
