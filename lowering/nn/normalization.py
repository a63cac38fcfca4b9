"""Layer, group and batch normalization, and softmax, with gradients.

Statistics and intermediate values are computed in the opmath dtype (float32 for the half types).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.operand import OneHot, as_dtype, materialize, sums_of_rows, up, written
from xla_amp.lowering.registry import register

Gradients = tuple[jax.Array | None, jax.Array | None, jax.Array | None]


def _statistics(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance over `axes`, kept as size 1.  Two passes avoid cancellation."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)


def _statistics_in_one_pass(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """`_statistics` by merging (count, mean, sum of squared deviations) of parts, without cancellation.

    Source: T. Chan, G. Golub, R. LeVeque: Updating formulae and a pairwise algorithm for computing sample variances
    (1979).
    """

    def join(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        (count, mean, squares), (more, mean_of_more, squares_of_more) = left, right
        total, distance = count + more, mean_of_more - mean
        share = more / jnp.maximum(total, 1)
        return total, mean + distance * share, squares + squares_of_more + distance * distance * count * share

    zero = jnp.zeros((), x.dtype)
    count, mean, squares = lax.reduce((jnp.ones_like(x), x, jnp.zeros_like(x)), (zero,) * 3, join, axes)
    return jnp.expand_dims(mean, axes), jnp.expand_dims(squares / count, axes)


def _affine(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """``x * weight + bias``, broadcast."""
    x = x if weight is None else x * as_dtype(weight, x.dtype)
    return x if bias is None else x + as_dtype(bias, x.dtype)


def _normalized_gradient(grad: jax.Array, normalized: jax.Array, rstd: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The gradient of ``x`` in ``normalized = (x - mean(x)) * rstd(x)``, with statistics over `axes`."""
    mean = jnp.mean(grad, axis=axes, keepdims=True)
    projection = jnp.mean(grad * normalized, axis=axes, keepdims=True)
    return rstd * (grad - mean - normalized * projection)


def _inverse_deviation(variance: jax.Array, eps: Any) -> jax.Array:
    return lax.rsqrt(variance + as_dtype(eps, variance.dtype))


# -- layer norm -------------------------------------------------------------------------------------------------------


@register("native_layer_norm", dynamic=("eps",))
def native_layer_norm(
    x: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: Any,
    *,
    platform: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Result, mean and inverse standard deviation.

    On GPU the two that the backward pass reads come from one pass over `x`, which the kernel that makes `x` can do,
    and are written.  Otherwise each kernel of the backward pass computes them again, and XLA writes
    ``grad * normalized`` in float32 to sum it.  A program without a backward pass leaves them out.
    """
    x = up(x)
    inner = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    mean, variance = _statistics(x, inner)
    rstd = _inverse_deviation(variance, eps)
    y = _affine((x - mean) * rstd, weight, bias)
    if platform == "gpu" and x.size:
        mean, variance = _statistics_in_one_pass(x, inner)
        mean, rstd = lax.optimization_barrier((mean, _inverse_deviation(variance, eps)))
    return y, mean, rstd


@register("native_layer_norm_backward")
def native_layer_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    output_mask: Sequence[bool],
    *,
    platform: str,
) -> Gradients:
    split = x.ndim - len(normalized_shape)
    inner = tuple(range(split, x.ndim))
    grad, x = up(grad), up(x)
    shape = x.shape[:split] + (1,) * len(inner)
    rstd = as_dtype(rstd, x.dtype).reshape(shape)
    normalized = (x - as_dtype(mean, x.dtype).reshape(shape)) * rstd
    terms = [x for x, want in zip((grad * normalized, grad), output_mask[1:], strict=True) if want]
    sums = iter(sums_of_rows(terms, split, platform))
    return (
        _normalized_gradient(_affine(grad, weight, None), normalized, rstd, inner) if output_mask[0] else None,
        next(sums) if output_mask[1] else None,
        next(sums) if output_mask[2] else None,
    )


# -- group norm: (N, C, *) as (N, group, C / group, elements) ---------------------------------------------------------


def _by_channel(parameter: jax.Array | None, group: int) -> jax.Array | None:
    """A vector over channels, reshaped to broadcast against (N, group, C / group, elements)."""
    return None if parameter is None else parameter.reshape(1, group, -1, 1)


@register("native_group_norm", dynamic=("eps",))
def native_group_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    grouped = up(x).reshape(N, group, C // group, HxW)
    mean, variance = _statistics(grouped, (2, 3))
    rstd = _inverse_deviation(variance, eps)
    y = _affine((grouped - mean) * rstd, _by_channel(weight, group), _by_channel(bias, group))
    return y.reshape(x.shape), mean[..., 0, 0], rstd[..., 0, 0]


@register("native_group_norm_backward")
def native_group_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Gradients:
    grouped, grad = (up(a).reshape(N, group, C // group, HxW) for a in (x, grad))
    mean, rstd = (as_dtype(a, grouped.dtype).reshape(N, group, 1, 1) for a in (mean, rstd))
    normalized = (grouped - mean) * rstd
    grad_x = None
    if output_mask[0]:
        weighted = _affine(grad, _by_channel(weight, group), None)
        grad_x = _normalized_gradient(weighted, normalized, rstd, (2, 3)).reshape(x.shape)
    return (
        grad_x,
        jnp.sum(grad * normalized, axis=(0, 3)).reshape(C) if output_mask[1] else None,
        jnp.sum(grad, axis=(0, 3)).reshape(C) if output_mask[2] else None,
    )


# -- batch norm -------------------------------------------------------------------------------------------------------


def _over_channels(x: jax.Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of batch statistics, and the shape in which a vector over channels broadcasts against `x`."""
    return (0, *range(2, x.ndim)), (1, x.shape[1], *(1,) * (x.ndim - 2))


def batch_statistics(x: jax.Array, running_mean: jax.Array | None, platform: str) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance of each channel of `x`, which has an opmath dtype.

    On GPU and TPU both come from one pass: a sum of `x`, and a sum of squared differences from a shift near the
    channel's mean.  If the shift is k standard deviations from the mean, the variance has a relative error of k squared
    times the rounding error of a sum (1e-7).  A mean far from zero does not matter by itself.

    =========  ==============================================================================================
    platform   shift
    =========  ==============================================================================================
    gpu        one element of the channel, from the middle of the batch: a few standard deviations off
    tpu        the running mean or zero, whichever is nearer: the convolution that computes `x` can then also compute
               the sums.  If both are 1e3 deviations off (the running mean has not converged yet, or is infinite), the
               variance has one correct digit.  Flax and PyTorch/XLA always use zero.
               Two passes without a running mean, and for inputs without spatial axes.
    cpu        none: two passes are as fast
    =========  ==============================================================================================
    """
    axes, shape = _over_channels(x)

    def squares(y: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(y), axis=axes)

    if platform == "gpu" and x.size:
        shift = x[(x.shape[0] // 2, slice(None), *(n // 2 for n in x.shape[2:]))]
        difference = x - shift.reshape(shape)
        distance = jnp.mean(difference, axis=axes)
        return shift + distance, jnp.maximum(squares(difference) - jnp.square(distance), 0)
    if platform == "tpu" and x.ndim > 2 and running_mean is not None:
        shift = as_dtype(running_mean, x.dtype)
        mean = jnp.mean(x, axis=axes)
        distance = mean - shift
        shifted = squares(x - shift.reshape(shape)) - jnp.square(distance)
        unshifted = squares(x) - jnp.square(mean)
        return mean, jnp.maximum(jnp.where(jnp.abs(distance) < jnp.abs(mean), shifted, unshifted), 0)
    mean, variance = _statistics(x, axes)
    return mean.reshape(-1), variance.reshape(-1)


def _update_running(running: jax.Array | None, value: jax.Array, momentum: Any) -> jax.Array | None:
    if running is None:
        return None
    share = as_dtype(momentum, value.dtype)
    return (1 - share) * as_dtype(running, value.dtype) + share * value


@register(
    "_native_batch_norm_legit",
    "native_batch_norm",
    mutates=("running_mean", "running_var"),
    lifted=("momentum",),
    dynamic=("eps",),
)
def native_batch_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    training: bool,
    momentum: Any,
    eps: Any,
    *,
    outs: Sequence[jax.ShapeDtypeStruct],
    platform: str,
) -> list[jax.Array]:
    """Result, saved mean and inverse standard deviation, then the new running statistics, if given.

    ``native_batch_norm`` updates the running statistics, which its schema does not declare.  The update of
    ``running_var`` uses the unbiased variance, the normalization the biased one.
    """
    _, shape = _over_channels(x)
    x = up(x)
    if training:
        mean, variance = batch_statistics(x, running_mean, platform)
        count = x.size // x.shape[1]
        running_mean = _update_running(running_mean, mean, momentum)
        running_var = _update_running(running_var, variance * (count / max(count - 1, 1)), momentum)
    else:
        mean, variance = as_dtype(running_mean, x.dtype), as_dtype(running_var, x.dtype)
    rstd = _inverse_deviation(variance, eps)
    factor = rstd if weight is None else rstd * as_dtype(weight, x.dtype)
    y = _affine(x - mean.reshape(shape), factor.reshape(shape), None if bias is None else bias.reshape(shape))
    if math.prod(outs[1].shape) == 0:  # in evaluation torch's CPU kernel saves nothing, its meta kernel does
        mean, rstd = mean[:0], rstd[:0]
    return [y, mean, rstd, *(a for a in (running_mean, running_var) if a is not None)]


@register("_native_batch_norm_legit.no_stats", lifted=("momentum",), dynamic=("eps",))
def batch_norm_without_statistics(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    training: bool,
    momentum: Any,
    eps: Any,
    *,
    outs: Sequence[jax.ShapeDtypeStruct],
    platform: str,
) -> list[jax.Array]:
    return native_batch_norm(x, weight, bias, None, None, True, momentum, eps, outs=outs, platform=platform)


@register("_batch_norm_with_update", mutates=("running_mean", "running_var"), lifted=("momentum",), dynamic=("eps",))
def batch_norm_with_update(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: Any,
    eps: Any,
    *,
    outs: Sequence[jax.ShapeDtypeStruct],
    platform: str,
) -> list[jax.Array]:
    """`native_batch_norm` in training, and an empty reserve (a vendor library's data for the gradient)."""
    running = (running_mean, running_var)
    results = native_batch_norm(x, weight, bias, *running, True, momentum, eps, outs=outs, platform=platform)
    return [*results[:3], jnp.zeros((0,), np.uint8), *results[3:]]


@register("batch_norm_backward", dynamic=("eps",))
def batch_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    save_mean: jax.Array | None,
    save_var: jax.Array | None,
    update: bool,
    eps: Any,
    output_mask: Sequence[bool],
    reserve: jax.Array,
    *,
    platform: str,
) -> Gradients:
    statistics = (running_mean, running_var, save_mean, save_var)  # `save_var` is the inverse deviation
    return native_batch_norm_backward(grad, x, weight, *statistics, update, eps, output_mask, platform=platform)


@register("native_batch_norm_backward", dynamic=("eps",))
def native_batch_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    save_mean: jax.Array | None,
    save_invstd: jax.Array | None,
    train: bool,
    eps: Any,
    output_mask: Sequence[bool],
    *,
    platform: str,
) -> Gradients:
    """Gradients of `x`, weight and bias; that of `x` reuses the other two, the only sums over the batch."""
    axes, shape = _over_channels(x)
    grad, x = up(written(grad, grad.dtype, platform)), up(x)
    mean = as_dtype(save_mean if train else running_mean, x.dtype)
    rstd = as_dtype(save_invstd, x.dtype) if train else _inverse_deviation(as_dtype(running_var, x.dtype), eps)
    centered = x - mean.reshape(shape)
    grad_bias, grad_weight = jnp.sum(grad, axis=axes), jnp.sum(grad * centered, axis=axes)
    if x.size:  # without elements the deviation is NaN, and the gradient zero
        grad_weight *= rstd
    grad_x = None
    if output_mask[0]:
        factor = rstd if weight is None else rstd * as_dtype(weight, x.dtype)
        if train:
            count = max(x.size // x.shape[1], 1)
            slope = grad_weight * rstd / count
            grad = grad - (grad_bias / count).reshape(shape) - centered * slope.reshape(shape)
        grad_x = grad * factor.reshape(shape)
    return grad_x, grad_weight if output_mask[1] else None, grad_bias if output_mask[2] else None


# -- softmax ----------------------------------------------------------------------------------------------------------


@register("_softmax")
def softmax(x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    return jax.nn.softmax(up(x), axis=dim) if x.ndim else jnp.exp(up(x) - up(x))  # NaN of an infinity


_ONE_PASS = 2**14
"""Elements of a row from which on it does not fit into a kernel of a GPU, which then reads it once for each sum."""


@register("_log_softmax")
def log_softmax(x: jax.Array, dim: int, half_to_float: bool, *, platform: str) -> jax.Array:
    if x.ndim == 0:
        return up(x) - up(x)
    if platform == "gpu" and x.shape[dim] >= _ONE_PASS:
        return _log_softmax_of_long_rows(up(x), dim % x.ndim)
    return jax.nn.log_softmax(up(x), axis=dim)


def _log_softmax_of_long_rows(x: jax.Array, axis: int) -> jax.Array:
    """`x` less the logarithm of the sum of exponentials, with maximum and sum from one pass over `x`."""

    def join(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (a, a_sum), (b, b_sum) = left, right
        less = jnp.where(a == b, 1, jnp.exp(-jnp.abs(a - b)))
        return jnp.maximum(a, b), jnp.where(a > b, a_sum + b_sum * less, a_sum * less + b_sum)

    zero = jnp.zeros((), x.dtype)
    maximum, total = lax.reduce((x, jnp.ones_like(x)), (zero - jnp.inf, zero), join, (axis,))
    total = jnp.where(maximum == jnp.inf, jnp.nan, total)
    return x - jnp.expand_dims(maximum, axis) - jnp.expand_dims(jnp.log(total), axis)


@register("_safe_softmax")
def safe_softmax(x: jax.Array, dim: int, dtype: np.dtype | None = None) -> jax.Array:
    """Softmax that returns zeros instead of NaN where all inputs are minus infinity."""
    x = up(x if dtype is None else as_dtype(x, dtype))
    masked = jnp.all(x == -jnp.inf, axis=dim, keepdims=True)
    return jnp.where(masked, 0, jax.nn.softmax(x, axis=dim))


@register("_masked_softmax")
def masked_softmax(x: jax.Array, mask: jax.Array, dim: int | None = None, mask_type: int | None = None) -> jax.Array:
    """Softmax of what is not masked; `mask` is of the shape of `x`, or of its rows (0) or its padding (1)."""
    batch, _, _, columns = x.shape if x.ndim == 4 else (1, 1, 1, 1)
    shapes = {0: (1, 1, *mask.shape), 1: (batch, 1, 1, columns)}
    mask = mask.reshape(shapes.get(2 if mask_type is None or x.ndim != 4 else mask_type, mask.shape))
    return jax.nn.softmax(jnp.where(mask, -jnp.inf, up(x)), axis=-1 if dim is None else dim)


@register("_masked_softmax_backward")
def masked_softmax_backward(grad: jax.Array, output: jax.Array, mask: jax.Array, dim: int | None = None) -> jax.Array:
    grad, output = up(grad), jnp.where(mask, 0, up(output))
    return output * (grad - jnp.sum(grad * output, axis=-1 if dim is None else dim, keepdims=True))


def _sum_along(x: jax.Array, dim: int) -> jax.Array:
    return jnp.sum(x, axis=dim if x.ndim else None, keepdims=True)


@register("_softmax_backward_data")
def softmax_backward(grad: jax.Array, output: jax.Array, dim: int, input_dtype: np.dtype) -> jax.Array:
    grad, output = up(grad), up(output)
    return grad * output - output * _sum_along(grad * output, dim)


@register("_log_softmax_backward_data", takes=(OneHot,))
def log_softmax_backward(grad: jax.Array | OneHot, output: jax.Array, dim: int, input_dtype: np.dtype) -> jax.Array:
    whole = up(materialize(grad))
    if isinstance(grad, OneHot) and grad.axis == dim % output.ndim:
        total = jnp.expand_dims(up(grad.values), grad.axis)
    else:
        total = _sum_along(whole, dim)
    return whole - jnp.exp(up(output)) * total
