"""Reductions, orders, Fourier transforms against PyTorch on the CPU: NaN, nothing, other dtypes, rare overloads.

Numbers without dimensions are in tests/lazy/ops/test_numbers.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from harness import check, check_rows, row, run, sample, tables


def block(dtype: torch.dtype) -> torch.Tensor:
    return sample(4, 5, 6, dtype=dtype)


def with_nan(dtype: torch.dtype) -> torch.Tensor:
    """NaN, an infinity, and a row of equal values."""
    x = sample(4, 5).clone()
    x[1, 2], x[3, 3], x[2] = math.nan, math.inf, 0.5
    return x.to(dtype)


EMPTY = torch.zeros(0, 3)
POINTS = torch.cat([sample(30, 2), torch.tensor([[-2.0, 0.0], [2.0, 2.0], [5.0, 0]])])
"""Some on the edges, one outside."""
EDGES = [torch.tensor([-2.0, 0.0, 1.0, 2.0]), torch.tensor([-1.0, 0.0, 2.0])]
RANGES = [-2.0, 2.0, -1.0, 3.0]

REDUCED = [
    *(row(name, "f", lambda d: (EMPTY,)) for name in ("sum", "mean", "prod", "all", "any", "linalg_vector_norm")),
    row("_aminmax", "f", lambda d: (with_nan(d),)),
    row("_aminmax.dim", "fi", lambda d: (block(d), 1, True)),
    row("sum", "f", lambda d: (with_nan(d),)),
    *(row("sum.dim_IntList", "fi", lambda d, dim=dim: (block(d), dim)) for dim in ([], None)),
    row("sum.dim_IntList", "fbi", lambda d: (block(d), [1]), dtype=torch.float64),
    row("sum.dim_IntList", "f", lambda d: (EMPTY, [0])),
    row("mean.dim", "i", lambda d: (block(d), []), dtype=torch.float64),
    *(row(f"{name}.dim", "tu", lambda d: (block(d), 1, True)) for name in ("all", "any")),
    *(row(f"{name}.dims", "t", lambda d: (block(d),)) for name in ("all", "any")),
    *(row(f"_is_{name}_true", "t", lambda d: (block(d),)) for name in ("all", "any")),
    row("histc", "f", lambda d: (torch.full((3,), 2.0), 5)),
    *(row("histogram.bin_ct", "f", lambda d, x=x: (x, 4)) for x in (torch.ones(5), torch.zeros(0))),
    row("histogram.bins_tensor", "f", lambda d: (POINTS[:, 0], EDGES[0])),
    row("_histogramdd_from_bin_cts", "f", lambda d: (POINTS, [3, 4]), range=RANGES, density=True),
    row("_histogramdd_from_bin_tensors", "f", lambda d: (POINTS, EDGES), weight=POINTS[:, 1].abs()),
    *(row("var.correction", "f", lambda d: (block(d), [0]), correction=correction) for correction in (0.5, 4)),
    row("var.correction", "f", lambda d: (EMPTY,)),
    row("var.correction", "d", lambda d: (block(d) + 1e6, [0, 2]), rtol=1e-8),  # one pass would cancel
    *(row("linalg_vector_norm", "fb", lambda d, p=p: (block(d), p, [1], True)) for p in (0, 0.5, -math.inf, -1)),
    row("linalg_vector_norm", "fb", lambda d: (block(d), 2, None, False), dtype=torch.float32),
    row("linalg_vector_norm", "h", lambda d: (torch.full((4,), 300.0, dtype=d),)),  # its square is beyond float16
    row("logsumexp", "f", lambda d: (torch.full((3, 4), -math.inf), [1])),
    row("logsumexp", "f", lambda d: (with_nan(d), [1])),
]

# Positions of equal values are unspecified where torch does not sort stably: values are compared instead.
ORDERED = [
    *(row(name, "fb", lambda d: (with_nan(d),)) for name in ("amax", "amin", "max", "min", "argmax", "argmin")),
    *(row(f"{name}.dim", "fb", lambda d: (with_nan(d), -1)) for name in ("max", "min")),
    *(row("sort.stable", "fb", lambda d: (with_nan(d),), stable=True, descending=down) for down in (False, True)),
    *(row("topk", "iu", lambda d, top=top: (block(d), 2, 1, top), skip=(1,)) for top in (True, False)),
    *(row("topk", "fb", lambda d, top=top: (with_nan(d), 3, 1, top), skip=(1,)) for top in (True, False)),
    *(row(name, "fb", lambda d: (with_nan(d),)) for name in ("median", "nanmedian")),
    *(row(f"{name}.dim", "fb", lambda d: (with_nan(d), 0)) for name in ("median", "nanmedian")),
    *(row(name, "t", lambda d: (block(d), -1), dtype=torch.float32) for name in ("cumsum", "cumprod")),
    *(row(name, "fb", lambda d, dim=dim: (with_nan(d), dim)) for name in ("cummax", "cummin") for dim in (0, 1)),
    *(row(name, "f", lambda d: (torch.full((3, 4), -math.inf), 1)) for name in ("logcumsumexp", "_logcumsumexp")),
    row("searchsorted.Scalar", "i", lambda d: (torch.tensor([1, 2, 5]), 2.5)),
    row("bucketize.Scalar", "f", lambda d: (2.0, torch.tensor([1.0, 2.0, 2.0, 3.0])), right=True, out_int32=True),
]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@tables(reduced=REDUCED, ordered=ORDERED)
def test_rows(rows):
    check_rows(rows)


def test_a_long_bfloat16_sum_is_accumulated_in_float32():
    x = torch.full((4096,), 1.0, dtype=torch.bfloat16)  # a bfloat16 accumulator stops at 256
    check("sum", x)
    check("cumsum", x, 0, wide=True)


def test_nan_of_either_sign_ranks_first():
    bits = torch.tensor([0x7FC00000, -0x400000, 0x3F800000], dtype=torch.int32)  # NaN, -NaN, 1.0
    check("topk", bits.view(torch.float32), 2, skip=(1,))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("topk", (3, 1)), ("topk", (3, 1, False)), ("sort", (1,)), ("kthvalue", (2, 1, True)), ("median.dim", (1, True))],
)
def test_positions_are_those_of_the_values(name, arguments):
    x = sample(4, 9, dtype=torch.int64)  # has equal values
    values, positions = run(name, x, *arguments)
    assert torch.equal(x.gather(1, positions), values)
    assert all(len(set(row.tolist())) == positions.shape[1] for row in positions)


def test_a_fourier_transform_to_an_odd_size():
    # the first coefficient of a real signal has no imaginary part; its value is not read
    for dim in ([1], [2, 0]):
        shape = [3 if axis == dim[-1] else 4 for axis in range(3)]
        check("_fft_c2r", sample(*shape, dtype=torch.complex128), dim, 1, 5)


def test_a_fourier_transform_of_nothing():
    check("_fft_c2c", sample(3, dtype=torch.complex64), [], 2, True)
    none = torch.empty(0, 4, dtype=torch.complex64)  # torch's own library refuses it on the CPU
    assert run("_fft_c2c", none, [1], 2, True)[0].shape == none.shape
