"""Histograms and repeated indices against torch on the CPU."""

from __future__ import annotations

import torch
from harness import check, sample, together

from xla_amp.lowering.math import ordering  # noqa: F401  (fills the table)


@together(("dtype", "density"), [(torch.float32, False), (torch.float64, True)])
def test_histogram(dtype, density):
    x = torch.cat([sample(50, dtype=dtype), torch.tensor([-2.0, 0.0, 2.0, 5.0], dtype=dtype)])  # edges and an outlier
    weight = sample(54, dtype=dtype, low=0.0)
    edges = torch.tensor([-2.0, -0.5, 0.0, 2.0], dtype=dtype)
    check("histogram.bins_tensor", x, edges, density=density)
    check("histogram.bins_tensor", x, edges, weight=weight, density=density)
    check("histogram.bin_ct", x, 7, density=density)
    check("histogram.bin_ct", x, 4, range=[-2.0, 2.0], weight=weight, density=density)
    check("histogram.bin_ct", torch.ones(5, dtype=dtype), 3)


def test_histogram_of_nothing():
    check("histogram.bin_ct", torch.zeros(0), 4)


@together("density", [False, True])
def test_histogram_of_points(density):
    # on edges, and outside
    x = torch.cat([sample(30, 2, dtype=torch.float64), torch.tensor([[-2.0, 0.0], [2.0, 2.0], [5.0, 0]]).double()])
    weight = sample(33, dtype=torch.float64, low=0.0)
    edges = [torch.tensor([-2.0, 0.0, 1.0, 2.0]).double(), torch.tensor([-1.0, 0.0, 2.0]).double()]
    check("_histogramdd_from_bin_tensors", x, edges, weight=weight, density=density)
    check("_histogramdd_from_bin_cts", x, [3, 4], density=density)
    check("_histogramdd_from_bin_cts", x, [3, 4], range=[-2.0, 2.0, -1.0, 3.0], weight=weight, density=density)
    check("_histogramdd_bin_edges", x, [3, 4])
    check("_histogramdd_bin_edges", x, [3, 4], range=[-2.0, 2.0, -1.0, 3.0])


@together("dtype", [torch.int32, torch.int64])
def test_repeat_interleave(dtype):
    check("repeat_interleave.Tensor", torch.tensor([2, 0, 3, 1], dtype=dtype), output_size=6)
    check("repeat_interleave.Tensor", torch.zeros(3, dtype=dtype), output_size=0)
