"""Normalization and softmax against torch on the CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from harness import check, check_rows, lowered, row, sample, together, untested

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
aten = torch.ops.aten


def options(dtype: torch.dtype) -> dict[str, Any]:
    # bfloat16 against float64: torch rounds in between; float32 sums have another order
    return {F64: {}, F32: {"rtol": 1e-5, "atol": 1e-5}, BF16: {"wide": True}}[dtype]


def forward(dtype: torch.dtype, kept: torch.dtype) -> dict[str, Any]:
    # where all is bfloat16 the CPU keeps the statistics of the batch in it, a device in float32
    return options(dtype) | ({"skip": (1, 2)} if kept is BF16 else {})


Affine = tuple[torch.Tensor | None, torch.Tensor | None]


def affine(channels: int | list[int], dtype: torch.dtype, given: bool) -> Affine:
    shape = [channels] if isinstance(channels, int) else channels
    if not given:
        return None, None
    return sample(*shape, dtype=dtype, seed=1), sample(*shape, dtype=dtype, seed=2)


@together("dtype", [F32, BF16], ids=str)
@together("given", [True, False], ids=["affine", "plain"])
@together(("shape", "over"), [((3, 4, 5), [5]), ((3, 4, 5), [4, 5]), ((7,), [7])], ids=str)
def test_layer_norm(shape: tuple[int, ...], over: list[int], given: bool, dtype: torch.dtype) -> None:
    x, (weight, bias) = sample(*shape, dtype=dtype), affine(over, dtype, given)
    check("native_layer_norm", x, over, weight, bias, 1e-5, **forward(dtype, dtype))
    _, mean, rstd = aten.native_layer_norm(x, over, weight, bias, 1e-5)
    grad = sample(*shape, dtype=dtype, seed=3)
    mask = [True, given, given]
    check("native_layer_norm_backward", grad, x, over, mean, rstd, weight, bias, mask, **options(dtype))


@together("dtype", [F32, BF16], ids=str)
@together("given", [True, False], ids=["affine", "plain"])
@together(("shape", "groups"), [((2, 6, 5), 3), ((2, 6, 3, 4), 1), ((2, 6, 2, 2, 2), 6)], ids=str)
def test_group_norm(shape: tuple[int, ...], groups: int, given: bool, dtype: torch.dtype) -> None:
    x, (weight, bias) = sample(*shape, dtype=dtype), affine(shape[1], dtype, given)
    sizes = (*shape[:2], math.prod(shape[2:]), groups)
    check("native_group_norm", x, weight, bias, *sizes, 1e-5, **options(dtype))
    _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    grad = sample(*shape, dtype=dtype, seed=3)
    check("native_group_norm_backward", grad, x, mean, rstd, weight, *sizes, [True, given, given], **options(dtype))


BATCH_KINDS = [(F64, F64), (F32, F32), (BF16, F32), (BF16, BF16)]
"""dtype of the input, and of weights and statistics."""


def running(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return sample(3, dtype=dtype, seed=4), sample(3, dtype=dtype, low=0.1, seed=5)


@together(("dtype", "kept"), BATCH_KINDS, ids=str)
@together("training", [True, False], ids=["training", "evaluation"])
@together("shape", [(4, 3), (2, 3, 4, 5)], ids=str)
@together("platform", ["cpu", "gpu", "tpu"])
def test_batch_norm(
    platform: str, shape: tuple[int, ...], training: bool, dtype: torch.dtype, kept: torch.dtype
) -> None:
    if platform != "cpu" and (len(shape) == 2 or kept is not F32):
        return  # the other forms differ in how they sum
    x, (weight, bias) = sample(*shape, dtype=dtype), affine(3, kept, True)
    mean, variance = running(kept)
    arguments = (x, weight, bias, mean, variance, training, 0.1, 1e-5)
    check("native_batch_norm", *arguments, platform=platform, **forward(dtype, kept))
    check("_native_batch_norm_legit", *arguments, platform=platform, **forward(dtype, kept))
    if arguments[5]:
        check("_batch_norm_with_update", *arguments[:5], *arguments[6:], platform=platform, **forward(dtype, kept))
    _, save_mean, save_rstd = aten.native_batch_norm(x, weight, bias, mean.clone(), variance.clone(), *arguments[5:])
    backward = (sample(*shape, dtype=dtype, seed=3), x, weight, mean, variance, save_mean, save_rstd, training, 1e-5)
    check("native_batch_norm_backward", *backward, [True] * 3, platform=platform, **options(dtype))
    reserve = torch.zeros(0, dtype=torch.uint8)
    check("batch_norm_backward", *backward, [True] * 3, reserve, platform=platform, **options(dtype))


@together("dtype", [F64, BF16], ids=str)
@together("platform", ["cpu", "gpu"])
def test_batch_norm_without_statistics_or_affine(platform: str, dtype: torch.dtype) -> None:
    x = sample(2, 3, 4, dtype=dtype)
    check("native_batch_norm", x, None, None, None, None, True, 0.1, 1e-5, platform=platform, **forward(dtype, dtype))
    check(
        "_native_batch_norm_legit.no_stats", x, None, None, True, 0.1, 1e-5, platform=platform, **forward(dtype, dtype)
    )
    _, mean, rstd = aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    backward = (sample(2, 3, 4, dtype=dtype, seed=3), x, None, None, None, mean, rstd, True, 1e-5)
    check("native_batch_norm_backward", *backward, [True, False, False], platform=platform, **options(dtype))


def test_batch_norm_in_evaluation_leaves_statistics_and_saves_what_is_promised() -> None:
    x, (mean, variance) = sample(2, 3, 4), running(F32)
    arguments = (x, None, None, mean, variance, False, 0.1, 1e-5)
    # torch's CPU kernel promises empty tensors, its meta kernel (which the engine asks) one number per channel
    for promised in (torch.empty(0), torch.empty(3)):
        like = [x, promised, promised, mean, variance]
        _, saved, _, new_mean, new_variance = lowered("native_batch_norm", *arguments, like=like, platform="cpu")
        assert saved.shape == promised.shape
        assert torch.equal(new_mean, mean)
        assert torch.equal(new_variance, variance)


def test_variance_does_not_cancel() -> None:
    # mean 1000, deviation 0.01: E[x^2] - E[x]^2 in float32 would lose the deviation
    x = (1000 + 0.01 * sample(4, 256, dtype=F64)).to(F32)
    check("native_layer_norm", x, [256], None, None, 1e-12, wide=True, rtol=2e-2, atol=2e-2)
    naive = (x * x).mean(1) - x.mean(1) ** 2
    assert (naive - x.double().var(1, correction=0)).abs().max() > 0.01


def soft(dim: int, *shape: int) -> Any:
    return lambda d: (sample(*shape, dtype=d), dim, False)


def soft_backward(dim: int, *shape: int) -> Any:
    return lambda d: (sample(*shape, dtype=d), sample(*shape, dtype=d, low=0, high=1, seed=1), dim, d)


def masked(dtype: torch.dtype) -> torch.Tensor:
    x = sample(3, 4, dtype=dtype)
    x[1] = x[2, 1] = -math.inf
    return x


ROWS = [
    *(row(f"_{name}", "fdb", soft(1, 3, 4), wide=True) for name in ("softmax", "log_softmax")),
    *(row(f"_{name}", "fdb", soft(-2, 3, 4, 5), wide=True) for name in ("softmax", "log_softmax")),
    *(row(f"_{name}", "fdb", soft(0), wide=True) for name in ("softmax", "log_softmax")),
    *(row(f"_{name}_backward_data", "fdb", soft_backward(1, 3, 4), wide=True) for name in ("softmax", "log_softmax")),
    *(row(f"_{name}_backward_data", "fdb", soft_backward(0), wide=True) for name in ("softmax", "log_softmax")),
    row("_softmax", "fdb", lambda d: (masked(d), -1, False), wide=True),
    row("_safe_softmax", "fdb", lambda d: (masked(d), -1), wide=True),
    row("_safe_softmax", "b", lambda d: (masked(d), 0, F32)),
]
ELSEWHERE = (
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
    *("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit"),
    *("_native_batch_norm_legit.no_stats", "_batch_norm_with_update", "batch_norm_backward"),
)


def test_softmax() -> None:
    check_rows(ROWS)


def test_every_lowering_is_tested() -> None:
    assert untested(["normalization"], ROWS, elsewhere=ELSEWHERE) == []
