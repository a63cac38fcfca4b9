"""Segment reductions and their gradients against torch on the CPU."""

from __future__ import annotations

import math

import torch
from harness import check, sample, together

REDUCTIONS = ("sum", "mean", "max", "min", "prod")
LENGTHS = {0: [3, 0, 1, 2], 1: [[1, 5], [6, 0], [0, 6], [3, 3]]}


def rows(dtype: torch.dtype) -> torch.Tensor:
    """With a zero, several zeros in a run, and equal greatest numbers."""
    x = sample(4, 6, 3, dtype=dtype)
    x[0, 0, 0] = 0
    x[1, 2, 1] = x[1, 3, 1] = 0
    x[2, 1:3, 2] = 7
    return x


def runs(axis: int, kind: str) -> dict[str, torch.Tensor]:
    lengths = torch.tensor(LENGTHS[axis])
    if kind == "lengths":
        return {"lengths": lengths}
    return {"offsets": torch.cat([torch.zeros_like(lengths[..., :1]), lengths.cumsum(-1)], -1)}


@together("kind", ["lengths", "offsets"])
@together("axis", [0, 1])
@together("reduce", REDUCTIONS)
def test_against_torch(reduce, axis, kind):
    x = rows(torch.float64)
    x = x.transpose(0, 1).contiguous() if axis == 0 else x
    given = runs(axis, kind)
    for initial in (None, 2.0):
        if initial is not None or reduce != "mean":  # means without rows are tested below
            check("segment_reduce", x, reduce, **given, axis=axis, unsafe=True, initial=initial)
        y = torch.segment_reduce(x, reduce, **given, axis=axis, unsafe=True, initial=initial)
        grad = sample(*y.shape, dtype=torch.float64, seed=1)
        check("_segment_reduce_backward", grad, y, x, reduce, **given, axis=axis, initial=initial)


def test_a_mean_of_no_rows():
    check("segment_reduce", sample(6, 2), "mean", lengths=torch.tensor([3, 0, 3]))


def test_nan_reaches_its_own_run():
    x = sample(6, 2)
    x[1, 0] = math.nan
    for reduce in REDUCTIONS:
        check("segment_reduce", x, reduce, lengths=torch.tensor([3, 3]), rtol=1e-5, atol=1e-6)
