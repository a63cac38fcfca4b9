"""Pooling and resampling against torch on the CPU: forms by platform, ties and NaN, sums of half types."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import check, sample, together

from xla_amp.lowering.nn import pooling

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
aten = torch.ops.aten


def with_ties(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return (sample(*shape, dtype=F64) * 2).round().to(dtype)


MAX_WINDOWS: dict[str, tuple[Any, ...]] = {
    "ceil": ([3], [2], [1], [1], True),
    "no stride given, ceil": ([2], [], [0], [1], True),
    "uneven": ([2, 3], [1, 2], [1, 0], [2, 1], True),
    "large": ([9], [2], [4], [1], False),
}


PLATFORMS = together("platform", ["cpu", "gpu", "tpu"])


@together("window", MAX_WINDOWS)
@PLATFORMS
def test_max_pool(platform: str, window: str) -> None:
    kernel, stride, *rest = MAX_WINDOWS[window]
    x = with_ties(2, 3, 11, 9, dtype=BF16)
    check("max_pool2d_with_indices", x, kernel, stride, *rest, rtol=0, atol=0, platform=platform)
    y, indices = aten.max_pool2d_with_indices(x, kernel, stride, *rest)
    backward = (sample(*y.shape, dtype=BF16, seed=1), x, kernel, stride or kernel, *rest, indices)
    # a TPU adds up to four gradients in bfloat16: three roundings of sums that may be larger than the result
    exact = platform != "tpu"
    tolerances = {"rtol": 2**-7} if exact else {"rtol": 2**-6, "atol": 2**-5}
    check("max_pool2d_with_indices_backward", *backward, wide=True, platform=platform, **tolerances)


@together("platform", ["cpu", "gpu"])
def test_max_pool_3d_and_unbatched(platform: str) -> None:
    x, window = with_ties(2, 5, 6, 7), ([3, 2, 2], [2], [1, 0, 1], [1], True)
    check("max_pool3d_with_indices", x, *window, platform=platform)
    y, indices = aten.max_pool3d_with_indices(x, *window)
    check(
        "max_pool3d_with_indices_backward",
        *(sample(*y.shape), x, [3, 2, 2], [2, 2, 2], [1, 0, 1], [1, 1, 1], True, indices),
        platform=platform,
    )


@PLATFORMS
def test_max_pool_specials(platform: str) -> None:
    x = sample(2, 3, 8, 8)
    x[0, 0, :2, :2] = math.nan
    x[1] = -math.inf
    check("max_pool2d_with_indices", x, [3], [2], [1], platform=platform)
    check("adaptive_max_pool2d", x, [3, 3])
    check("max_pool2d_with_indices", sample(1, 8, 8, dtype=torch.int64), [3], [2], [1], platform=platform)


@pytest.mark.parametrize(("kernel", "dtype"), [(3, "bf16"), (9, "f32")])
def test_many_gradients_for_one_place_are_not_added_in_a_half(kernel: int, dtype: str) -> None:
    def backward(grad: jax.Array, x: jax.Array) -> jax.Array:
        window = ([kernel], [2], [0], [1], False)
        return pooling.max_pool_backward(grad, x, *window, None, platform="tpu", rank=2)

    grad, x = (jax.ShapeDtypeStruct((1, 1, n, n), jnp.bfloat16) for n in ((19 - kernel) // 2 + 1, 19))
    (sums,) = [line for line in str(jax.make_jaxpr(backward)(grad, x)).splitlines() if "select_and_scatter_add" in line]
    assert f":{dtype}[1,1,19,19]" in sums


@pytest.mark.parametrize("taps", [0, 64], ids=["scatter", "taps"])
def test_max_pool_gradient_forms(monkeypatch: pytest.MonkeyPatch, taps: int) -> None:
    monkeypatch.setattr(pooling, "MAX_SUMMED_TAPS", taps)
    x, window = with_ties(1, 2, 7, 6, dtype=F64), ([3, 3], [1, 2], [1, 1], [1, 1], False)
    y, indices = aten.max_pool2d_with_indices(x, *window)
    check("max_pool2d_with_indices_backward", sample(*y.shape, dtype=F64), x, *window, indices)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_positions_cost_nothing_when_unread(platform: str) -> None:
    def pooled(x: jax.Array, part: slice) -> Any:
        out = jax.ShapeDtypeStruct((1, 4, 4), x.dtype)
        return pooling.max_pool(x, [2], [2], out=out, platform=platform, rank=2)[part]

    x = np.zeros((1, 8, 8), np.float32)
    values = jax.jit(lambda x: pooled(x, slice(0, 1))).lower(x).compile().as_text()
    both = jax.jit(lambda x: pooled(x, slice(0, 2))).lower(x).compile().as_text()
    assert "s32[" not in values
    assert "s32[" in both


def test_average_windows_with_gaps_and_of_integers() -> None:
    check("avg_pool2d", sample(2, 3, 11, 9), [2, 3], [4, 5], [1, 0])
    check("avg_pool2d_backward", sample(2, 3, 3, 2), sample(2, 3, 11, 9), [2, 3], [4, 5], [1, 0], False, True, None)
    check("avg_pool2d", sample(1, 8, 8, dtype=torch.int64).abs(), [3], [2], [1])


@together("size", [(1, 1), (7, 7), (13, 5)])
def test_adaptive_windows_of_halves(size: tuple[int, int]) -> None:
    x, grad = sample(2, 11, 9, dtype=BF16), sample(2, *size, dtype=BF16, seed=1)
    check("_adaptive_avg_pool2d", x, size, wide=True)
    check("_adaptive_avg_pool2d_backward", grad, x, wide=True)
    check("adaptive_max_pool2d_backward", grad, x, aten.adaptive_max_pool2d(x, size)[1], wide=True)


def test_upsample_by_factors() -> None:
    x, grad, scales = sample(1, 2, 7, 5), sample(1, 2, 10, 8), (1.5, 1.7)
    check("_upsample_nearest_exact2d", x, [10, 8], *scales)
    check("_upsample_nearest_exact2d_backward", grad, [10, 8], [1, 2, 7, 5], *scales)
    check("_upsample_bicubic2d_aa", x, [10, 8], False, *scales)
    check("_upsample_bicubic2d_aa_backward", grad, [10, 8], [1, 2, 7, 5], False, *scales)


def test_upsample_specials() -> None:
    check("upsample_nearest2d", sample(1, 2, 3, 4, dtype=torch.uint8), [6, 9])
    # An infinity must not spread: a dense matrix product would make the whole row NaN.
    x = sample(1, 1, 4, 4)
    x[0, 0, 0, 0] = math.inf
    check("upsample_nearest2d", x, [8, 8])
    check("upsample_bilinear2d", x, [3, 3], False)


def test_grid_sampler_under_its_other_name() -> None:
    x, grid = sample(2, 3, 5, 6, dtype=F32), sample(2, 4, 7, 2, dtype=F32, low=-1.6, high=1.6, seed=5)
    check("_grid_sampler_2d_cpu_fallback", x, grid, 0, 1, True)
    check("_grid_sampler_2d_cpu_fallback_backward", sample(2, 3, 4, 7, dtype=F32, seed=7), x, grid, 0, 1, True)
