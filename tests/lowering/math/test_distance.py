"""Distances against torch on the CPU, forward and backward."""

from __future__ import annotations

import torch
from harness import check, sample, together

from xla_amp.lowering.math import distance  # noqa: F401  (fills the table)

orders = together("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])


def points(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    x = sample(*shape, dtype=dtype, seed=seed)
    x[..., 0, :] = x[..., 1, :] if shape[-2] > 1 else x[..., 0, :]  # a distance of 0
    return x


@orders
@together("dtype", [torch.float32, torch.float64])
def test_cdist(p, dtype):
    x, y = points(2, 4, 3, dtype=dtype), points(2, 5, 3, dtype=dtype, seed=1)
    y[:, 2], y[:, 3, 1] = x[:, 1], x[:, 2, 1]
    check("_cdist_forward", x, y, p, None)
    found = torch.ops.aten._cdist_forward(x, y, p, None)
    check("_cdist_backward", sample(2, 4, 5, dtype=dtype), x, y, p, found)


@orders
def test_pdist(p):
    x = points(6, 3)
    check("_pdist_forward", x, p)
    found = torch.ops.aten._pdist_forward(x, p)
    check("_pdist_backward", sample(15, dtype=torch.float64), x, p, found)


@together("mode", [None, 0, 1, 2])
@together("rows", [3, 30])
def test_euclidean_distances_by_product(rows, mode):
    x, y = sample(rows, 3, dtype=torch.float64), sample(4, 3, dtype=torch.float64, seed=1)
    check("_cdist_forward", x, y, 2.0, mode)
    check("_euclidean_dist", x, y)


def test_no_points():
    check("_cdist_forward", torch.empty(0, 3), torch.ones(2, 3), 2.0, None)
    check("_cdist_forward", torch.empty(2, 0), torch.empty(3, 0), 2.0, None)
