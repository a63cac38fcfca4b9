"""Operations on lists of tensors against torch on the CPU, functional and in place."""

from __future__ import annotations

import math
from typing import Any

import torch
from harness import check, is_here, sample, together

from xla_amp.lowering import table

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
NAMES = sorted(name for name in table() if name.startswith("_foreach_") and is_here(name))
POSITIVE = ("log", "log10", "log2", "log1p", "sqrt", "rsqrt", "lgamma", "pow")


def lists(name: str, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Three lists of three tensors, the last 0-dimensional, where `name` is defined."""
    low, high = (0.3, 2.0) if name in POSITIVE else (-0.9, 0.9)
    return [
        [sample(*shape, dtype=dtype, low=low, high=high, seed=seed + i) for i, shape in enumerate(((3, 4), (5,), ()))]
        for seed in (1, 4, 7)
    ]


def arguments(name: str, overload: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Sample arguments by the overload's name, which gives the type of the last one."""
    xs, ys, zs = lists(name, dtype)
    last: Any = {
        "List": ys,
        "Scalar": 0.7,
        "ScalarList": [0.3, 2, 1.0],
        "Tensor": torch.tensor(0.7, dtype=dtype),
        "": None,
    }.get(overload)
    if name == "copy":
        return xs, [y.float() for y in ys]
    if name == "norm":
        return xs, 2
    if overload == "ScalarAndTensor":
        return 0.9, xs
    if name == "lerp":
        return xs, ys, zs if overload == "List" else last
    if name in ("addcmul", "addcdiv"):
        return xs, ys, zs, torch.tensor([0.3, 0.5, 0.7], dtype=dtype) if overload == "Tensor" else last
    return (xs,) if last is None else (xs, last)


@together("name", NAMES)
def test_as_torch(name: str) -> None:
    base, _, overload = name.removeprefix("_foreach_").partition(".")
    inplace, base = base.endswith("_"), base.removesuffix("_")
    # both forms share their arithmetic: float64 in one shows lost digits, bfloat16 in the other a double rounding
    # of tensors of numbers torch's check wants them on the CPU, the device's check on the device: no call passes both
    platform = "gpu" if overload == "Tensor" and base in ("addcmul", "addcdiv") else "cpu"
    check(name, *arguments(base, overload, F64 if inplace else BF16), platform=platform)


@together("name", ["_foreach_add.List", "_foreach_sub_.List", "_foreach_add.Tensor"])
def test_alpha(name: str) -> None:
    base, _, overload = name.removeprefix("_foreach_").partition(".")
    check(name, *arguments(base.removesuffix("_"), overload, F32), alpha=0.3)


def test_norms() -> None:
    for order in (0, 1, 2.5, math.inf):
        check("_foreach_norm.Scalar", lists("norm", F32)[0], order)
    # 300**2 overflows float16, and its sum of 4096 ones would stop at 2048
    check("_foreach_norm.Scalar", [torch.full((4096,), 300.0, dtype=torch.float16)], 2, F32)


def test_promotion_and_an_empty_tensor() -> None:
    integers = [sample(3, dtype=torch.int64), sample(2, 2, dtype=torch.int64)]
    check("_foreach_mul.Scalar", integers, 2.5)
    check("_foreach_div.Scalar", integers, 2)
    check("_foreach_sqrt", [x.abs() for x in integers])
    check("_foreach_add_.Scalar", integers, 2)
    check("_foreach_add.List", [sample(3)], [sample(3, dtype=BF16)])
    check("_foreach_copy_", [sample(3, 4)], [sample(4, dtype=F64)])
    check("_foreach_add.Scalar", [torch.empty(0)], 1.0)
