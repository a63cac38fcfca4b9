"""Fractional max pooling against torch on the CPU, with the same random samples."""

from __future__ import annotations

import math

import torch
from harness import check, sample, together

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
CASES = {
    "2d": (2, (9, 7), [2, 3], [4, 3]),
    "2d, one row": (2, (5, 6), [5, 2], [1, 4]),
    "3d": (3, (6, 7, 8), [2, 3, 2], [3, 2, 4]),
}


@together("dtype", [F32, F64], ids=str)
@together("case", CASES)
@together("batched", [True, False])
def test_against_torch(case, dtype, batched):
    rank, spatial, window, rows = CASES[case]
    x = (sample(2, 3, *spatial, dtype=F64) * 2).round().to(dtype)  # with ties
    x[0, 0, *(1,) * rank] = math.nan
    x = x if batched else x[0]
    draws = torch.rand(2 if batched else 1, 3, rank, dtype=F64, generator=torch.Generator().manual_seed(3)).to(dtype)
    name = f"fractional_max_pool{rank}d"
    check(name, x, window, rows, draws, rtol=0, atol=0)
    y, indices = getattr(torch.ops.aten, name)(x, window, rows, draws)
    grad = sample(*y.shape, dtype=dtype, seed=1)
    check(f"{name}_backward", grad, x, window, rows, indices)
