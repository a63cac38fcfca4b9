"""Losses and their gradients, connectionist temporal classification included.

Everything is computed and summed in the opmath dtype (float32 for the half types).  `reduction` is torch's code: 0
returns the loss of every element, 1 the mean, 2 the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.lowering.operand import OneHot, as_dtype, opmath, up
from xla_amp.lowering.registry import register

_NONE, _MEAN, _SUM = range(3)
_LOG_FLOOR = -100.0
"""torch's lower bound of the logarithms in binary cross-entropy: the loss of a certain wrong prediction is finite."""
_DENOMINATOR_FLOOR = float(np.float32(1e-12))
"""torch's constant is a C float, also for float64."""


def _reduce(loss: jax.Array, reduction: int) -> jax.Array:
    if reduction == _NONE:
        return loss
    return jnp.mean(loss) if reduction == _MEAN else jnp.sum(loss)


def _per_element(grad: jax.Array, reduction: int, count: int) -> jax.Array:
    """The gradient of each of `count` losses, from the gradient of the reduced loss."""
    return up(grad) / count if reduction == _MEAN else up(grad)


# -- elementwise: a loss of (input, target) and its derivative in the input -------------------------------------------


def _huber(difference: Any, delta: Any) -> Any:
    size = jnp.abs(difference)
    return jnp.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta))


def _smooth_l1(difference: Any, beta: Any) -> Any:
    size = jnp.abs(difference)
    return jnp.where(size < beta, 0.5 * size * size / beta, size - 0.5 * beta)


def _smooth_l1_slope(difference: Any, beta: Any) -> Any:
    return jnp.where(difference <= -beta, -1.0, jnp.where(difference >= beta, 1.0, difference / beta))


_ELEMENTWISE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "huber_loss": (
        lambda x, t, delta=1.0: _huber(x - t, delta),
        lambda x, t, delta: jnp.clip(x - t, -delta, delta),
    ),
    "mse_loss": (
        lambda x, t: jnp.square(x - t),
        lambda x, t: 2 * (x - t),
    ),
    "smooth_l1_loss": (
        lambda x, t, beta=1.0: _smooth_l1(x - t, beta),
        lambda x, t, beta: _smooth_l1_slope(x - t, beta),
    ),
    "soft_margin_loss": (
        lambda x, t: jax.nn.softplus(-(t * x)),  # the product first: `t` may be an unsigned integer or a bool
        lambda x, t: -(t * jax.nn.sigmoid(-(t * x))),
    ),
}
"""Operation -> (loss, slope); schemas are ``(self, target, reduction, *parameters)`` and ``(grad, self, ...)``."""


def _define(name: str, loss: Callable[..., Any], slope: Callable[..., Any]) -> None:
    @register(name, dynamic=("delta", "beta"))
    def forward(x: jax.Array, target: jax.Array, reduction: int = _MEAN, *parameters: Any) -> jax.Array:
        x = up(x)
        return _reduce(loss(x, up(target), *(as_dtype(number, x.dtype) for number in parameters)), reduction)

    @register(f"{name}_backward", dynamic=("delta", "beta"))
    def backward(grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, *parameters: Any) -> jax.Array:
        x = up(x)
        numbers = (as_dtype(number, x.dtype) for number in parameters)
        grad_x: jax.Array = slope(x, up(target), *numbers) * _per_element(grad, reduction, x.size)
        return grad_x


for _name, _row in _ELEMENTWISE.items():
    _define(_name, *_row)


@register("binary_cross_entropy")
def binary_cross_entropy(
    x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = _MEAN
) -> jax.Array:
    x, target = up(x), up(target)
    loss = (target - 1) * jnp.maximum(jnp.log1p(-x), _LOG_FLOOR) - target * jnp.maximum(jnp.log(x), _LOG_FLOOR)
    return _reduce(loss if weight is None else loss * up(weight), reduction)


@register("binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = _MEAN
) -> jax.Array:
    x, target = up(x), up(target)
    slope = (x - target) / jnp.maximum((1 - x) * x, _DENOMINATOR_FLOOR)
    slope = slope if weight is None else slope * up(weight)
    return slope * _per_element(grad, reduction, x.size)


@register("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    pos_weight: jax.Array | None = None,
    reduction: int = _MEAN,
) -> jax.Array:
    x, target = up(x), up(target)
    log_sigmoid = -jax.nn.softplus(-x)
    if pos_weight is not None:
        log_sigmoid = log_sigmoid * (1 + (up(pos_weight) - 1) * target)
    loss = (1 - target) * x - log_sigmoid
    return _reduce(loss if weight is None else loss * up(weight), reduction)


# -- classification: classes along axis 1, or along axis 0 of a single sample -----------------------------------------


def _class_weights(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, ignored: int
) -> tuple[jax.Array, jax.Array]:
    """Each target's weight, 0 if ignored; and the targets, with class 0 for ignored ones."""
    keep = target != ignored
    target = jnp.where(keep, target, 0)
    weights = jnp.ones(target.shape, opmath(x.dtype)) if weight is None else up(weight)[target]
    return jnp.where(keep, weights, 0), target


@register("nll_loss_forward", "nll_loss2d_forward")
def nll_loss_forward(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    axis = 1 if x.ndim > 1 else 0
    weights, target = _class_weights(x, target, weight, ignore_index)
    picked = jnp.take_along_axis(up(x), jnp.expand_dims(target, axis), axis=axis)
    loss = jnp.where(weights == 0, 0, -jnp.squeeze(picked, axis) * weights)
    total_weight = jnp.sum(weights)
    if reduction == _NONE:  # torch returns the total weight only for a single sample
        return loss, jnp.zeros((), loss.dtype) if x.ndim > 1 else total_weight
    total = jnp.sum(loss)
    return (total / total_weight if reduction == _MEAN else total), total_weight


@register("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: jax.Array,
) -> OneHot:
    axis = 1 if x.ndim > 1 else 0
    weights, target = _class_weights(x, target, weight, ignore_index)
    grad = up(grad) / up(total_weight) if reduction == _MEAN else up(grad)
    slope = jnp.where(weights == 0, 0, -weights * grad)
    return OneHot(as_dtype(slope, x.dtype), target, axis, x.shape[axis])


# ---- connectionist temporal classification ---------------------------------------------------------------------------


_NEVER = -1e30
"""The logarithm of what cannot happen, finite so that derivatives are."""


def _shift(x: jax.Array, by: int) -> jax.Array:
    """The value `by` states before each state."""
    return jnp.pad(x, [(0, 0), (by, 0)], constant_values=_NEVER)[:, : x.shape[1]]


def _forward(
    log_probs: jax.Array, targets: jax.Array, input_lengths: jax.Array, target_lengths: jax.Array, blank: int
) -> tuple[jax.Array, jax.Array]:
    """(losses [batch], log_alpha [batch, time, states]); the states of a target are its labels with blanks between."""
    batch, width = targets.shape
    state, last = jnp.arange(2 * width + 1)[None, :], 2 * target_lengths[:, None]
    labels = jnp.full((batch, 2 * width + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    labels = jnp.where(state <= last, labels, blank)
    before = jnp.pad(labels[:, :-2], [(0, 0), (2, 0)], constant_values=blank)
    # A state can follow the second state before it if it is no blank and the labels differ.
    skips = (labels != blank) & (labels != before) & (state > 1)
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(labels, (log_probs.shape[0], *labels.shape)), -1)
    emitted = jnp.where(state <= last, jnp.maximum(emitted, _NEVER), _NEVER)

    def step(alpha: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        time, here = inputs
        skip = jnp.where(skips, _shift(alpha, 2), _NEVER)
        moved = jnp.logaddexp(jnp.logaddexp(alpha, _shift(alpha, 1)), skip) + here
        # The path starts in one of the first two states.
        new = jnp.where(time == 0, jnp.where(state < 2, here, _NEVER), moved)
        running = time < input_lengths[:, None]
        return jnp.where(running, new, alpha), jnp.where(running, new, _NEVER)

    start = jnp.full(labels.shape, _NEVER, log_probs.dtype)
    final, alphas = lax.scan(step, start, (jnp.arange(log_probs.shape[0]), emitted))
    blank_last = jnp.take_along_axis(final, last, 1)[:, 0]
    label_last = jnp.where(target_lengths > 0, jnp.take_along_axis(final, jnp.maximum(last - 1, 0), 1)[:, 0], _NEVER)
    losses = jnp.where((input_lengths == 0) & (target_lengths == 0), 0, -jnp.logaddexp(blank_last, label_last))
    return losses, jnp.moveaxis(alphas, 0, 1)


def _wide(x: jax.Array) -> jax.Array:
    return as_dtype(x, jnp.promote_types(x.dtype, jnp.float32))


@register("_ctc_loss.Tensor")
def ctc_loss(
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(losses [batch], log_alpha [batch, time, states]); log_probs [time, batch, classes], targets [batch, S].

    The loss of a target without an alignment is inf; with `zero_infinity` torch itself replaces it afterwards.  Half
    types are computed in float32.
    """
    losses, log_alpha = _forward(_wide(log_probs), targets, input_lengths, target_lengths, blank)
    return jnp.where(losses > -_NEVER / 2, jnp.inf, losses), jnp.where(log_alpha < _NEVER / 2, -jnp.inf, log_alpha)


@register("_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    grad: jax.Array,
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: jax.Array,
    target_lengths: jax.Array,
    losses: jax.Array,
    log_alpha: jax.Array,
    blank: int,
    zero_infinity: bool = False,
) -> jax.Array:
    """The gradient of what `log_probs` are the log_softmax of, as torch defines it; zero past each input's end."""
    log_probs = _wide(log_probs)

    def loss(x: jax.Array) -> jax.Array:
        return _forward(x, targets, input_lengths, target_lengths, blank)[0]

    again, pullback = jax.vjp(loss, log_probs)
    result = (jnp.exp(log_probs) + pullback(jnp.ones_like(again))[0]) * as_dtype(grad, log_probs.dtype)[None, :, None]
    result = jnp.where((again > -_NEVER / 2)[None, :, None], 0 if zero_infinity else jnp.nan, result)
    used = jnp.arange(log_probs.shape[0])[:, None] < input_lengths[None, :]
    return jnp.where(used[..., None], result, 0)
