"""Batch norm's one-pass statistics: accuracy where a channel's mean is far from zero, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import lowered, lowering_of, sample

from xla_amp.lowering.nn.normalization import _batch_statistics

F32, BF16 = torch.float32, torch.bfloat16
aten = torch.ops.aten


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
    mean, variance = jax.jit(_batch_statistics, static_argnums=2)(jnp.asarray(x.float().numpy()), near, platform)
    axes = (0, *range(2, x.dim()))
    exact = x.double().mean(axes), x.double().var(axes, correction=0)
    error = np.abs(np.asarray(mean, np.float64) - exact[0].numpy()) / exact[1].sqrt().numpy()
    return float(error.max()), float(np.abs(np.asarray(variance, np.float64) / exact[1].numpy() - 1).max())


@pytest.mark.parametrize("shape", [(16, 4, 24, 24), (1, 4, 50, 60), (4000, 4)], ids=str)
@pytest.mark.parametrize("mean", [0.0, 30.0, 1e3, 1e4])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_statistics_far_from_zero(platform: str, mean: float, shape: tuple[int, ...]) -> None:
    x = off_center(mean, shape=shape)
    followed = x.double().mean((0, *range(2, x.dim())))  # the converged running mean
    center, variance = statistics_in_error(x, followed, platform)
    assert center < 1e-5 + 1e-7 * mean  # the mean itself is a float32
    assert variance < 1e-5


@pytest.mark.parametrize(("mean", "error"), [(1.0, 1e-5), (30.0, 1e-3)])
def test_statistics_on_tpu_before_the_running_mean_converges(mean: float, error: float) -> None:
    assert statistics_in_error(off_center(mean), torch.zeros(4), "tpu")[1] < error


@pytest.mark.parametrize("running", [1e6, 1e30, float("inf"), float("nan")])
def test_a_running_mean_that_has_met_an_overflow_does_no_harm_on_tpu(running: float) -> None:
    """In training torch's statistics depend on the batch alone: they recover with the next finite batch."""
    center, variance = statistics_in_error(off_center(1.0), torch.full((4,), running), "tpu")
    assert center < 1e-5
    assert variance < 1e-5


def test_differences_of_plain_squares_would_fail() -> None:
    """Without a shift, as on a TPU whose running mean has not converged, the tests above would fail."""
    assert statistics_in_error(off_center(1e3), torch.zeros(4), "tpu")[1] > 1e-2
    assert statistics_in_error(off_center(1e3), None, "tpu")[1] < 1e-5  # no running mean, two passes


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_constant_channel_has_no_negative_variance(platform: str) -> None:
    x = torch.full((8, 2, 5, 5), 3.3)
    like = [x, *(torch.empty(2) for _ in range(4))]
    arguments = (x, torch.ones(2), torch.zeros(2), torch.zeros(2), torch.ones(2), True, 0.1, 1e-5)
    y, _, rstd, _, _ = lowered("native_batch_norm", *arguments, like=like, platform=platform)
    assert y.abs().max() < 1e-2
    assert torch.isfinite(rstd).all()


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gradients_where_the_mean_is_far_from_zero(platform: str, dtype: torch.dtype) -> None:
    """A sum of ``grad * x`` instead of ``grad * (x - mean)`` would lose the weight's gradient."""
    x, grad = off_center(100.0, dtype, (6, 4, 9, 9)), sample(6, 4, 9, 9, dtype=dtype, seed=3)
    weight = sample(4, dtype=F32, seed=1)
    wide = (grad.double(), x.double(), weight.double(), None, None)
    axes = (0, 2, 3)
    mean, rstd = x.double().mean(axes), (x.double().var(axes, correction=0) + 1e-5).rsqrt()
    expected = aten.native_batch_norm_backward(*wide, mean, rstd, True, 1e-5, [True] * 3)
    narrow = (grad, x, weight, None, None, mean.float(), rstd.float(), True, 1e-5, [True] * 3)
    like = [torch.empty_like(x), torch.empty(4), torch.empty(4)]
    got = lowered("native_batch_norm_backward", *narrow, like=like, platform=platform)
    for one, other in zip(got, expected, strict=True):
        tolerance = {"rtol": 2**-8, "atol": 2**-8} if one.dtype == BF16 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(one.double(), other, **tolerance)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_an_empty_batch(platform: str) -> None:
    x = torch.empty(0, 3, 4, 4)
    vectors = [torch.ones(3) for _ in range(4)]
    like = [x, *(torch.empty(3) for _ in range(4))]
    y, *_ = lowered("native_batch_norm", x, *vectors, False, 0.1, 1e-5, like=like, platform=platform)
    assert y.shape == x.shape
    backward = (x, x, vectors[0], *vectors[2:], *vectors[:2], True, 1e-5, [True] * 3)
    grad, weight, bias = lowered("native_batch_norm_backward", *backward, like=[x, *like[1:3]], platform=platform)
    assert grad.shape == x.shape
    assert not weight.any()
    assert not bias.any()


def test_the_gradient_that_two_kernels_read_is_kept_low_on_gpu() -> None:
    """A barrier, only for half gradients, keeps XLA from recomputing them from wider values."""

    def barriers(dtype: jnp.dtype, platform: str) -> int:
        x = jax.ShapeDtypeStruct((2, 3, 4, 4), dtype)
        vector = jax.ShapeDtypeStruct((3,), jnp.float32)

        def backward(grad: jax.Array, x: jax.Array, weight: jax.Array, mean: jax.Array, rstd: jax.Array) -> object:
            function = lowering_of("native_batch_norm_backward").function
            return function(grad, x, weight, None, None, mean, rstd, True, 1e-5, [True] * 3, platform=platform)

        return str(jax.make_jaxpr(backward)(x, x, vector, vector, vector)).count("optimization_barrier")

    assert barriers(jnp.bfloat16, "gpu") == 1
    assert [barriers(jnp.float32, "gpu"), barriers(jnp.bfloat16, "tpu"), barriers(jnp.bfloat16, "cpu")] == [0, 0, 0]
