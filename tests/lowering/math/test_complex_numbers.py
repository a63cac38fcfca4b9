"""Complex numbers from their parts, against torch on the CPU."""

from __future__ import annotations

import torch
from harness import check, sample, together

from xla_amp.lowering.math import fourier  # noqa: F401  (fills the table)


@together("dtype", [torch.float32, torch.float64])
@together("name", ["complex", "polar"])
def test_from_two_numbers(name, dtype):
    x, y = sample(3, 1, dtype=dtype), sample(4, dtype=dtype, seed=1)
    check(name, x, y)
    check(name, x, torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], dtype=dtype))
