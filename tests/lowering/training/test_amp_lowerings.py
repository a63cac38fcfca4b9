"""The check of gradients against torch on the CPU; the update of the scale is in tests/test_loss_scaling.py."""

from __future__ import annotations

import math

import torch
from harness import check, compare, run, sample, together

CHECK = "_amp_foreach_non_finite_check_and_unscale_"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def gradients(dtype: torch.dtype, bad: float | None) -> list[torch.Tensor]:
    grads = [sample(3, 4, dtype=dtype), sample(5, dtype=dtype, seed=1), sample(dtype=dtype, seed=2)]
    if bad is not None:
        grads[1][2] = bad
    return grads


@together("dtype", DTYPES, ids=str)
@together("bad", [None, math.nan, -math.inf])
def test_check_and_unscale(dtype: torch.dtype, bad: float | None) -> None:
    for found in (0.0, 1.0):
        check(CHECK, gradients(dtype, bad), torch.tensor([found]), torch.tensor([0.125]))


def test_a_flag_that_is_set_stays_set() -> None:
    grads, found = gradients(torch.float32, None), torch.tensor([1.0])
    assert run(CHECK, grads, found, torch.tensor(1.0))[-1].item() == 1


def test_float64_is_checked_as_float64() -> None:
    check(CHECK, [torch.tensor([1e300], dtype=torch.float64)], torch.tensor([0.0]), torch.tensor([0.5]))


def test_unscaling_rounds_once() -> None:
    # a bfloat16 product of the bfloat16 inverse 0.333984 would be off by up to two places
    grads, found, inverse = [sample(64, dtype=torch.bfloat16)], torch.tensor([0.0]), torch.tensor([1 / 3])
    got = run(CHECK, grads, found, inverse)[0]
    compare(got, (grads[0].double() / 3).to(torch.bfloat16), rtol=0, atol=0)
    assert not torch.equal(grads[0] * inverse.to(torch.bfloat16), got)
