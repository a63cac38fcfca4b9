"""Batch norm on each platform, statistics of half types and far from zero, against torch on the CPU or float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import check, lowered, lowering_of, sample, together
from torch.nn import functional as F

import xla_amp
from xla_amp.lowering.nn.normalization import batch_statistics

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
aten = torch.ops.aten


def options(dtype: torch.dtype) -> dict[str, Any]:
    # bfloat16 against float64: torch rounds in between; float32 sums have another order
    return {"wide": True} if dtype is BF16 else {"rtol": 1e-5, "atol": 1e-5}


def forward(dtype: torch.dtype, kept: torch.dtype) -> dict[str, Any]:
    # where all is bfloat16 the CPU keeps the statistics of the batch in it, a device in float32
    return options(dtype) | ({"skip": (1, 2)} if kept is BF16 else {})


def running(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return sample(3, dtype=dtype, seed=4), sample(3, dtype=dtype, low=0.1, seed=5)


@together(
    ("platform", "dtype", "kept"), [("cpu", BF16, F32), ("cpu", BF16, BF16), ("gpu", BF16, F32), ("tpu", F32, F32)]
)
@together("training", [True, False])
def test_batch_norm(platform: str, training: bool, dtype: torch.dtype, kept: torch.dtype) -> None:
    """Of `dtype`, with weights and statistics of `kept`."""
    shape = (2, 3, 4, 5)
    x, weight, bias = sample(*shape, dtype=dtype), sample(3, dtype=kept, seed=1), sample(3, dtype=kept, seed=2)
    mean, variance = running(kept)
    arguments = (x, weight, bias, mean, variance, training, 0.1, 1e-5)
    check("native_batch_norm", *arguments, platform=platform, **forward(dtype, kept))
    _, save_mean, save_rstd = aten.native_batch_norm(x, weight, bias, mean.clone(), variance.clone(), *arguments[5:])
    backward = (sample(*shape, dtype=dtype, seed=3), x, weight, mean, variance, save_mean, save_rstd, training, 1e-5)
    check("native_batch_norm_backward", *backward, [True] * 3, platform=platform, **options(dtype))


@together("platform", ["cpu", "gpu"])
def test_batch_norm_without_statistics_or_affine(platform: str) -> None:
    x = sample(2, 3, 4, dtype=BF16)
    options: dict[str, Any] = {"platform": platform, "wide": True}
    for name, more in (("native_batch_norm", (None, None)), ("_native_batch_norm_legit.no_stats", ())):
        check(name, x, None, None, *more, True, 0.1, 1e-5, **options, skip=(1, 2))
    _, mean, rstd = aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    backward = (sample(2, 3, 4, dtype=BF16, seed=3), x, None, None, None, mean, rstd, True, 1e-5)
    check("native_batch_norm_backward", *backward, [True, False, False], **options)


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


@together("platform", ["cpu", "gpu"])
def test_variance_does_not_cancel(platform: str) -> None:
    # mean 1000, deviation 0.01: E[x^2] - E[x]^2 in float32 would lose the deviation
    x = (1000 + 0.01 * sample(4, 256, dtype=F64)).to(F32)
    check("native_layer_norm", x, [256], None, None, 1e-12, platform=platform, wide=True, rtol=2e-2, atol=2e-2)
    outlier = sample(8, 4096)
    outlier[:, 2048] = 1e4  # one feature that is far off in each row
    check("native_layer_norm", outlier, [4096], None, None, 1e-5, platform=platform, wide=True, rtol=1e-5, atol=1e-5)


@together("dtype", [F32, BF16])
def test_layer_norm_and_its_gradients_on_gpu(dtype: torch.dtype) -> None:
    """Statistics from one pass, and two sums over 2048 rows in one pass of two stages."""
    on_gpu: dict[str, Any] = {"platform": "gpu", "wide": True}
    for x in (sample(2, 1024, 24, dtype=dtype), (300 + 0.5 * sample(2048, 24, dtype=F64)).to(dtype)):
        weight, bias, shape = sample(24, seed=1), sample(24, seed=2), [24]
        check("native_layer_norm", x.float(), shape, weight, bias, 1e-5, **on_gpu, rtol=2e-4, atol=2e-4)
        _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, 1e-5)
        assert mean.dtype is F32
        backward = (sample(*x.shape, dtype=dtype, seed=3), x, shape, mean, rstd, weight, bias)
        check("native_layer_norm_backward", *backward, [True] * 3, **on_gpu, rtol=1e-2, atol=1e-2)


def test_layer_norm_on_gpu_sums_only_what_is_asked_for() -> None:
    backward = lowering_of("native_layer_norm_backward").function
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1024, 8)))
    vector = x.reshape(-1, 8)[:, 0].reshape(2, 1024, 1)
    whole = backward(x, x, [8], vector, vector, None, None, [True] * 3, platform="cpu")
    for mask in ([True, False, False], [False, True, False], [False, False, True]):
        results = backward(x, x, [8], vector, vector, None, None, mask, platform="gpu")
        assert [result is not None for result in results] == mask
        for result, expected in zip(results, whole, strict=True):
            if result is not None:
                np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_log_softmax_of_long_rows_on_gpu_reads_them_once_for_both_sums() -> None:
    x = sample(6, 20_000) * 30
    x[1] = -math.inf
    x[2, 5] = math.inf
    x[3, 7] = math.nan
    x[4, :-1] = -math.inf
    for each in (x, x.to(BF16), x.double()):
        check("_log_softmax", each, 1, False, platform="gpu", wide=True)
        check("_log_softmax", each.t().contiguous(), 0, False, platform="gpu", wide=True)
    function = lowering_of("_log_softmax").function
    reduced = [
        str(jax.make_jaxpr(lambda x, n=n: function(x[:, :n], 1, False, platform="gpu"))(jnp.ones((2, 2**14))))
        for n in (2**14, 512)
    ]
    assert [text.count("reduce_max") for text in reduced] == [0, 1]


def test_softmax_with_a_mask_of_rows_of_padding_or_of_all() -> None:
    x, grad = sample(2, 3, 5, 5), sample(2, 3, 5, 5, seed=2)
    masks = {0: sample(5, 5, seed=3) > 0, 1: sample(2, 5, seed=4) > 0, 2: sample(2, 3, 5, 5, seed=5) > 0, None: x > 0}
    for kind, mask in masks.items():
        mask[..., 0] = False
        check("_masked_softmax", x, mask, 3, kind)
    check("_masked_softmax", x, masks[2])
    check("_masked_softmax_backward", grad, aten._masked_softmax(x, masks[2], 3, 2), masks[2], 3)


def test_softmax_of_rows_that_are_masked() -> None:
    for dtype in (F32, F64, BF16):
        x = sample(3, 4, dtype=dtype)
        x[1] = x[2, 1] = -math.inf
        check("_softmax", x, -1, False, wide=True)
        check("_safe_softmax", x, -1, wide=True)
    check("_safe_softmax", x, 0, F32)


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, [256]),
    "group_norm": lambda x: F.group_norm(x.view(4, 16, 16), 4),
    "batch_norm": lambda x: F.batch_norm(x.view(4, 4, 64), None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x.view(4, 4, 64)),
    "rms_norm": lambda x: F.rms_norm(x, [256]),
    "softmax": lambda x: F.softmax(x / 8, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x / 50, -1),  # its gradient reads the rounded result
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_result_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    """The mean, 50, is far from zero: a difference from a rounded mean is wrong in the second digit."""
    torch.manual_seed(0)
    x = (torch.randn(4, 256) * 3 + 50).to(dtype)
    grad = torch.randn(CALLS[name](x.double()).shape)
    found = []
    for each in (x.to(xla_amp.xla_device()), x.double()):
        leaf = each.detach().requires_grad_()
        y = CALLS[name](leaf)
        y.backward(grad.to(y))
        assert leaf.grad is not None
        found.append((y.detach().cpu().double(), leaf.grad.cpu().double()))
    (got, slope), (wanted, expected) = found
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got, wanted, rtol=0.51 * step, atol=1e-5)
    # the gradient starts from the rounded `grad`, and from a result that was rounded where torch saves it
    torch.testing.assert_close(slope, expected, rtol=4 * step, atol=4 * step * float(expected.abs().max()))


def off_center(mean: float, dtype: torch.dtype = F32, shape: tuple[int, ...] = (16, 4, 24, 24)) -> torch.Tensor:
    """Channels with standard deviations one and two around `mean` and its negative."""
    generator = torch.Generator().manual_seed(7)
    channels = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    spread = torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    view = (1, 4, *(1,) * (len(shape) - 2))
    return (mean * channels.reshape(view) + spread.reshape(view) * noise).to(dtype)


def statistics_in_error(x: torch.Tensor, running_mean: torch.Tensor | None, platform: str) -> tuple[float, float]:
    """The largest errors over all channels: the mean's in standard deviations, and the variance's relative error."""
    near = None if running_mean is None else jnp.asarray(running_mean.float().numpy())
    mean, variance = jax.jit(batch_statistics, static_argnums=2)(jnp.asarray(x.float().numpy()), near, platform)
    axes = (0, *range(2, x.dim()))
    exact = x.double().mean(axes), x.double().var(axes, correction=0)
    error = np.abs(np.asarray(mean, np.float64) - exact[0].numpy()) / exact[1].sqrt().numpy()
    return float(error.max()), float(np.abs(np.asarray(variance, np.float64) / exact[1].numpy() - 1).max())


@pytest.mark.parametrize("shape", [(16, 4, 24, 24), (1, 4, 50, 60), (4000, 4)], ids=str)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_statistics_far_from_zero(platform: str, shape: tuple[int, ...]) -> None:
    for mean in (0.0, 30.0, 1e3, 1e4):
        x = off_center(mean, shape=shape)
        followed = x.double().mean((0, *range(2, x.dim())))  # the converged running mean
        center, variance = statistics_in_error(x, followed, platform)
        assert center < 1e-5 + 1e-7 * mean  # the mean itself is a float32
        assert variance < 1e-5


def test_statistics_on_tpu_before_the_running_mean_converges() -> None:
    for mean, error in ((1.0, 1e-5), (30.0, 1e-3)):
        assert statistics_in_error(off_center(mean), torch.zeros(4), "tpu")[1] < error
    # the test above would fail without a shift
    assert statistics_in_error(off_center(1e3), torch.zeros(4), "tpu")[1] > 1e-2
    assert statistics_in_error(off_center(1e3), None, "tpu")[1] < 1e-5  # no running mean, two passes


def test_a_running_mean_that_has_met_an_overflow_does_no_harm_on_tpu() -> None:
    """In training torch's statistics depend on the batch alone: they recover with the next finite batch."""
    for running in (1e6, 1e30, math.inf, math.nan):
        assert max(statistics_in_error(off_center(1.0), torch.full((4,), running), "tpu")) < 1e-5


def test_a_constant_channel_has_no_negative_variance() -> None:
    x = torch.full((8, 2, 5, 5), 3.3)
    like = [x, *(torch.empty(2) for _ in range(4))]
    arguments = (x, torch.ones(2), torch.zeros(2), torch.zeros(2), torch.ones(2), True, 0.1, 1e-5)
    for platform in ("gpu", "tpu"):
        y, _, rstd, _, _ = lowered("native_batch_norm", *arguments, like=like, platform=platform)
        assert y.abs().max() < 1e-2
        assert torch.isfinite(rstd).all()


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", F32), ("gpu", BF16), ("tpu", BF16)], ids=str)
def test_gradients_where_the_mean_is_far_from_zero(platform: str, dtype: torch.dtype) -> None:
    """A sum of ``grad * x`` instead of ``grad * (x - mean)`` would lose the weight's gradient."""
    x, grad = off_center(100.0, dtype, (6, 4, 9, 9)), sample(6, 4, 9, 9, dtype=dtype, seed=3)
    weight = sample(4, dtype=F32, seed=1)
    axes = (0, 2, 3)
    mean, rstd = x.double().mean(axes), (x.double().var(axes, correction=0) + 1e-5).rsqrt()
    wide = (grad.double(), x.double(), weight.double(), None, None, mean, rstd, True, 1e-5, [True] * 3)
    expected = aten.native_batch_norm_backward(*wide)
    narrow = (grad, x, weight, None, None, mean.float(), rstd.float(), *wide[7:])
    like = [torch.empty_like(x), torch.empty(4), torch.empty(4)]
    got = lowered("native_batch_norm_backward", *narrow, like=like, platform=platform)
    for one, other in zip(got, expected, strict=True):
        error = 2**-8 if one.dtype == BF16 else 1e-4
        torch.testing.assert_close(one.double(), other, rtol=error, atol=error)


@together("platform", ["cpu", "gpu", "tpu"])
def test_an_empty_batch(platform: str) -> None:
    x = torch.empty(0, 3, 4, 4)
    vectors = [torch.ones(3) for _ in range(4)]
    like = [x, *vectors]
    y, *_ = lowered("native_batch_norm", x, *vectors, False, 0.1, 1e-5, like=like, platform=platform)
    assert y.shape == x.shape
    backward = (x, x, vectors[0], *vectors[2:], *vectors[:2], True, 1e-5, [True] * 3)
    grad, weight, bias = lowered("native_batch_norm_backward", *backward, like=[x, *like[1:3]], platform=platform)
    assert grad.shape == x.shape
    assert not weight.any()
    assert not bias.any()
