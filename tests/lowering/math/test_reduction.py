"""Reductions, sorting, running reductions and searching against PyTorch on the CPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from harness import OLD, check, check_rows, row, run, sample, tables, untested


def block(dtype: torch.dtype) -> torch.Tensor:
    return sample(4, 5, 6, dtype=dtype)


def with_nan(dtype: torch.dtype) -> torch.Tensor:
    """NaN, an infinity, and a row of equal values."""
    x = sample(4, 5).clone()
    x[1, 2], x[3, 3], x[2] = math.nan, math.inf, 0.5
    return x.to(dtype)


def scalar(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(2).to(dtype)


EMPTY = torch.zeros(0, 3)

SUMS = [
    row("sum", "fbit", lambda d: (block(d),)),
    row("sum", "f", lambda d: (with_nan(d),)),
    row("sum", "f", lambda d: (EMPTY,)),
    row("sum.dim_IntList", "fbit", lambda d: (block(d), [1], True)),
    *(row("sum.dim_IntList", "fi", lambda d, dim=dim: (block(d), dim)) for dim in ([], [0, -1], None)),
    row("sum.dim_IntList", "fbi", lambda d: (block(d), [1]), dtype=torch.float64),
    row("sum.dim_IntList", "f", lambda d: (scalar(d), [0])),
    row("sum.dim_IntList", "f", lambda d: (EMPTY, [0])),
    row("mean", "fb", lambda d: (block(d),)),
    row("mean", "f", lambda d: (EMPTY,)),
    row("mean.dim", "fb", lambda d: (block(d), [1, 2], True)),
    row("mean.dim", "fi", lambda d: (block(d), []), dtype=torch.float64),
    row("nansum", "fi", lambda d: (block(d), [1])),
    row("nansum", "fb", lambda d: (with_nan(d),), wide=True),  # torch rounds bfloat16 after each term
    row("prod", "fbit", lambda d: (block(d)[0, :2].contiguous(),)),
    row("prod", "f", lambda d: (EMPTY,)),
    row("prod.dim_int", "fbit", lambda d: (block(d), 1, True)),
    row("prod.dim_int", "i", lambda d: (block(d), 1), dtype=torch.float32),
    row("trace", "fi" if OLD else "fbi", lambda d: (block(d)[0].contiguous(),)),  # torch 2.11: none for bfloat16
]

EXTREMES = [
    *(row(name, "fbit", lambda d: (block(d), [1], True)) for name in ("amax", "amin")),
    *(row(name, "f", lambda d: (block(d), [0, 2])) for name in ("amax", "amin")),
    *(row(name, "fb", lambda d: (with_nan(d),)) for name in ("amax", "amin", "max", "min", "argmax", "argmin")),
    *(row(name, "fbit", lambda d: (block(d),)) for name in ("max", "min")),
    *(row(f"{name}.dim", "fbit", lambda d: (block(d), 1, True)) for name in ("max", "min")),
    *(row(f"{name}.dim", "fb", lambda d: (with_nan(d), -1)) for name in ("max", "min")),
    *(row(f"{name}.dim", "f", lambda d: (scalar(d), 0)) for name in ("max", "min")),
    *(row(name, "fbi", lambda d: (block(d), 1, True)) for name in ("argmax", "argmin")),
    *(row(name, "fi", lambda d: (block(d), None, True)) for name in ("argmax", "argmin")),
    *(row(name, "f", lambda d: (scalar(d),)) for name in ("argmax", "argmin", "max", "amax")),
    row("aminmax", "fbi", lambda d: (block(d),)),
    row("aminmax", "fbt", lambda d: (block(d),), dim=1, keepdim=True),
    row("aminmax", "f", lambda d: (with_nan(d),)),
    row("_aminmax", "f", lambda d: (block(d),)),
    row("_aminmax.dim", "f", lambda d: (block(d), 1)),
]

TRUTH = [
    *(row(name, "fitu", lambda d: (block(d),)) for name in ("all", "any")),
    *(row(name, "f", lambda d: (EMPTY,)) for name in ("all", "any")),
    *(row(f"{name}.dim", "ftu", lambda d: (block(d), 1, True)) for name in ("all", "any")),
    *(row(f"{name}.dims", "t", lambda d: (block(d), [0, 1])) for name in ("all", "any")),
    *(row(f"{name}.dims", "t", lambda d: (block(d),)) for name in ("all", "any")),
    *(row(f"_is_{name}_true", "t", lambda d: (block(d),)) for name in ("all", "any")),
    *(row("count_nonzero", "fit", lambda d, dim=dim: (block(d), dim)) for dim in (None, 1)),
    row("count_nonzero.dim_IntList", "i", lambda d: (block(d), [0, 1])),
    row("histc", "f", lambda d: (block(d), 7, -2, 2.5)),
    row("histc", "fb", lambda d: (block(d),), wide=True),  # torch finds the bins of bfloat16 in bfloat16
    row("histc", "f", lambda d: (torch.full((3,), 2.0), 5)),
]

MOMENTS = [
    *(row(f"{name}.correction", "fb", lambda d: (block(d),)) for name in ("var", "std", "var_mean", "std_mean")),
    *(
        row(f"{name}.correction", "f", lambda d: (block(d), [0]), correction=correction, keepdim=keep)
        for name in ("var", "std", "var_mean", "std_mean")
        for correction, keep in ((0, True), (2, False), (0.5, False), (4, False))
    ),
    row("var.correction", "f", lambda d: (EMPTY,)),
    row("var.correction", "d", lambda d: (block(d) + 1e6, [0, 2]), rtol=1e-8),  # one pass would cancel
]

ORDERS = (0, 1, 2, 3, 0.5, math.inf, -math.inf, -1)
NORMS = [
    *(row("linalg_vector_norm", "fb", lambda d, order=order: (block(d), order, [1], True)) for order in ORDERS),
    *(row("linalg_vector_norm", "f", lambda d, order=order: (block(d), order)) for order in (1, 2, math.inf)),
    row("linalg_vector_norm", "fb", lambda d: (block(d), 2, None, False), dtype=torch.float32),
    row("linalg_vector_norm", "h", lambda d: (torch.full((4,), 300.0, dtype=d),)),  # its square is beyond float16
    row("linalg_vector_norm", "f", lambda d: (EMPTY,)),
    row("norm.Scalar", "fb", lambda d: (block(d), 3)),
    row("norm.ScalarOpt_dim", "fb", lambda d: (block(d), None, [1], True)),
    row("norm.ScalarOpt_dim_dtype", "f", lambda d: (block(d), 2, [1], True), dtype=torch.float64),
    row("norm.ScalarOpt_dtype", "f", lambda d: (block(d), 1), dtype=torch.float64),
    row("renorm", "fb", lambda d: (block(d), 2, 1, 4.0)),
    row("renorm", "f", lambda d: (block(d), 1, 0, 4.0)),
    *(row("logsumexp", "fbi", lambda d, dim=dim: (block(d), dim, True)) for dim in ([1], [0, 2])),
    row("logsumexp", "f", lambda d: (torch.full((3, 4), -math.inf), [1])),
    row("logsumexp", "f", lambda d: (with_nan(d), [1])),
]

# Positions of equal values are unspecified where torch does not sort stably: values are compared instead.
SORTING = [
    *(row("sort.stable", "fbit", lambda d: (block(d),), stable=True, dim=1, descending=down) for down in (False, True)),
    *(row("sort.stable", "fb", lambda d: (with_nan(d),), stable=True, descending=down) for down in (False, True)),
    *(row("sort", "fi", lambda d, down=down: (block(d), -1, down), skip=(1,)) for down in (False, True)),
    row("sort", "f", lambda d: (scalar(d),)),
    *(row("topk", "fbiu", lambda d, top=top: (block(d), 2, 1, top), skip=(1,)) for top in (True, False)),
    *(row("topk", "fb", lambda d, top=top: (with_nan(d), 3, 1, top), skip=(1,)) for top in (True, False)),
    *(row("topk", "f", lambda d, top=top: (-with_nan(d), 3, 1, top), skip=(1,)) for top in (True, False)),
    row("topk", "f", lambda d: (scalar(d), 1)),
    row("kthvalue", "fb", lambda d: (block(d), 2, 1, True)),
    row("kthvalue", "i", lambda d: (block(d), 2, 1), skip=(1,)),
    row("kthvalue", "f", lambda d: (scalar(d), 1)),
    *(row(name, "fbi", lambda d: (block(d),)) for name in ("median", "nanmedian")),
    *(row(name, "fb", lambda d: (with_nan(d),)) for name in ("median", "nanmedian")),
    *(row(f"{name}.dim", "fbi", lambda d: (block(d), 1, True), skip=(1,)) for name in ("median", "nanmedian")),
    *(row(f"{name}.dim", "fb", lambda d: (with_nan(d), 0)) for name in ("median", "nanmedian")),
    row("median.dim", "f", lambda d: (scalar(d), 0)),
    row("mode", "fit", lambda d: (block(d), 1, True)),
    row("mode", "i", lambda d: (block(d),)),
    row("mode", "f", lambda d: (scalar(d),)),
]

RUNNING = [
    *(row(name, "fbi", lambda d: (block(d), 1)) for name in ("cumsum", "cumprod")),
    *(row(name, "it", lambda d: (block(d), -1), dtype=torch.float32) for name in ("cumsum", "cumprod")),
    *(row(name, "f", lambda d: (scalar(d), 0)) for name in ("cumsum", "cumprod", "cummax", "logcumsumexp")),
    *(row(name, "fbit", lambda d: (block(d), 1)) for name in ("cummax", "cummin")),
    *(row(name, "fb", lambda d, dim=dim: (with_nan(d), dim)) for name in ("cummax", "cummin") for dim in (0, 1)),
    row("logcumsumexp", "fb", lambda d: (block(d), 1)),
    row("logcumsumexp", "f", lambda d: (torch.full((3, 4), -math.inf), 1)),
    row("_logcumsumexp", "f", lambda d: (block(d), 1)),
]

EDGES = torch.tensor([1.0, 2.0, 2.0, 3.0])
SEARCHING = [
    *(row("bucketize.Tensor", "f", lambda d: (sample(3, 4), EDGES), right=right) for right in (False, True)),
    *(row("searchsorted.Tensor", "f", lambda d: (EDGES, torch.tensor(2.0)), right=right) for right in (False, True)),
    row("searchsorted.Tensor", "f", lambda d: (sample(3, 5).sort()[0], sample(3, 4))),
    row(
        "searchsorted.Tensor",
        "i",
        lambda d: (torch.tensor([3, 1, 2]), torch.tensor([2, 5])),
        side="right",
        sorter=torch.tensor([1, 2, 0]),
    ),
    row("searchsorted.Scalar", "i", lambda d: (torch.tensor([1, 2, 5]), 2.5)),
    row("bucketize.Scalar", "f", lambda d: (2.0, EDGES), right=True, out_int32=True),
    row("isin.Tensor_Tensor", "ifb", lambda d: (sample(3, 4).round().to(d), torch.tensor([1, 2, 3]).to(d))),
    row("isin.Tensor_Scalar", "i", lambda d: (sample(3, 4, dtype=d), 2), invert=True),
    row("isin.Scalar_Tensor", "i", lambda d: (2, torch.tensor([1, 2, 3]))),
]

TABLES = {
    "sums": SUMS,
    "extremes": EXTREMES,
    "truth": TRUTH,
    "moments": MOMENTS,
    "norms": NORMS,
    "sorting": SORTING,
    "running": RUNNING,
    "searching": SEARCHING,
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning", "ignore:_aminmax is deprecated:UserWarning")
@tables(**TABLES)
def test_rows(rows):
    check_rows(rows)


OTHERS = (
    "_histogramdd_bin_edges",
    "_histogramdd_from_bin_cts",
    "_histogramdd_from_bin_tensors",
    "_segment_reduce_backward",
    "histogram.bin_ct",
    "histogram.bins_tensor",
    "repeat_interleave.Tensor",
    "segment_reduce",
)
"""Tested in test_counting.py and test_segments.py."""


def test_every_operation_is_tested():
    assert untested(("reduction", "ordering"), itertools.chain(*TABLES.values()), elsewhere=OTHERS) == []


def test_a_long_bfloat16_sum_is_accumulated_in_float32():
    x = torch.full((4096,), 1.0, dtype=torch.bfloat16)  # a bfloat16 accumulator stops at 256
    check("sum", x)
    check("mean", x)
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
