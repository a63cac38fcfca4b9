"""Distances of 0 and of no points against torch on the CPU, forward and backward."""

from __future__ import annotations

import torch
from harness import check, sample, together

from xla_amp.lowering.math import distance  # noqa: F401  (fills the table)


@together("p", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf")])
def test_points_that_coincide(p):
    x, y = sample(2, 4, 3, dtype=torch.float64), sample(2, 5, 3, dtype=torch.float64, seed=1)
    x[:, 0] = x[:, 1]
    y[:, 2], y[:, 3, 1] = x[:, 1], x[:, 2, 1]
    check("_cdist_forward", x, y, p, None)
    found = torch.ops.aten._cdist_forward(x, y, p, None)
    check("_cdist_backward", sample(2, 4, 5, dtype=torch.float64), x, y, p, found)
    check("_pdist_forward", x[0], p)
    check("_pdist_backward", sample(6, dtype=torch.float64), x[0], p, torch.ops.aten._pdist_forward(x[0], p))


@together("mode", [None, 0, 1, 2])
@together("rows", [3, 30])
def test_euclidean_distances_by_product(rows, mode):
    x, y = sample(rows, 3, dtype=torch.float64), sample(4, 3, dtype=torch.float64, seed=1)
    check("_cdist_forward", x, y, 2.0, mode)
    check("_euclidean_dist", x, y)


def test_no_points():
    check("_cdist_forward", torch.empty(0, 3), torch.ones(2, 3), 2.0, None)
    check("_cdist_forward", torch.empty(2, 0), torch.empty(3, 0), 2.0, None)
