"""Activations and their gradients.

The formulas are torch's (ATen/native/cpu/Activation.cpp), on values in the opmath dtype; `_define` converts tensor and
number arguments to it.  At a kink they take the same side as torch; NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.operand import Biased, as_dtype, materialize, opmath, stored, up, written
from xla_amp.lowering.registry import register

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715  # D. Hendrycks, K. Gimpel: Gaussian Error Linear Units (2016)


def _gelu_backward(grad: Any, x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        # 1 + tanh(u) = 2 sigmoid(2u), 1 - tanh(u) ** 2 = 4 sigmoid(2u) sigmoid(-2u): no digits are lost at the ends
        twice = 2 * _SQRT_2_OVER_PI * (x + _TANH_CUBIC * x * x * x)
        slope = 2 * _SQRT_2_OVER_PI * (1 + 3 * _TANH_CUBIC * x * x)
        return grad * jax.nn.sigmoid(twice) * (1 + x * slope * jax.nn.sigmoid(-twice))
    density = jnp.exp(-0.5 * x * x) * (0.5 * _SQRT_2_OVER_PI)
    return grad * (0.5 * (1 + lax.erf(x * _SQRT_HALF)) + x * density)


def _silu_backward(grad: Any, x: Any) -> Any:
    gate = jax.nn.sigmoid(x)
    return grad * gate * (1 + x * (1 - gate))


def _mish_backward(grad: Any, x: Any) -> Any:
    gate = jnp.tanh(jax.nn.softplus(x))
    return grad * (gate + x * jax.nn.sigmoid(x) * (1 - gate * gate))


def _log_sigmoid(x: Any) -> tuple[Any, Any]:
    """``log(sigmoid(x))`` and torch's buffer ``exp(-|x|)``."""
    buffer = jnp.exp(-jnp.abs(x))
    return jnp.minimum(x, 0) - jnp.log1p(buffer), buffer


def _logit_backward(grad: Any, x: Any, eps: Any = None) -> Any:
    inside = (x >= 0) & (x <= 1) if eps is None else (x >= eps) & (x <= 1 - eps)
    return jnp.where(inside, grad / (x * (1 - x)), jnp.nan if eps is None else 0)


def _elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    # Clamp the exponential's argument: it would overflow for positive numbers, where its value is not used.
    return jnp.where(x > 0, x * scale, jnp.expm1(jnp.minimum(x, 0) * input_scale) * (alpha * scale))


def _elu_backward(grad: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, value: Any) -> Any:
    low = alpha * scale
    below = value + low if is_result else low * jnp.exp(jnp.minimum(value, 0) * input_scale)
    return jnp.where(value > 0, grad * scale, grad * input_scale * below)


def _leaky_relu(x: Any, negative_slope: Any = 0.01) -> Any:
    return jnp.where(x > 0, x, x * negative_slope)


def _softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta)


def _hardswish_backward(grad: Any, x: Any) -> Any:
    return jnp.where(x <= -3, 0, jnp.where(x < 3, grad * (x / 3 + 0.5), grad))


def _shrink_backward(grad: Any, x: Any, lambd: Any) -> Any:
    return jnp.where(jnp.abs(x) <= lambd, 0, grad)


def _prelu_backward(grad: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    return jnp.where(x > 0, grad, weight * grad), jnp.where(x > 0, 0, x * grad)


FORMULAS: dict[str, tuple[int, Callable[..., Any]]] = {
    "_prelu_kernel": (2, lambda x, weight: jnp.where(x > 0, x, weight * x)),
    "_prelu_kernel_backward": (3, _prelu_backward),
    "elu": (1, _elu),
    "elu_backward": (1, _elu_backward),
    "gelu": (1, lambda x, *, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh")),
    "gelu_backward": (2, _gelu_backward),
    "hardshrink": (1, lambda x, lambd=0.5: jnp.where(jnp.abs(x) <= lambd, 0, x)),
    "hardshrink_backward": (2, _shrink_backward),
    "hardsigmoid": (1, lambda x: jnp.clip(x + 3, 0, 6) / 6),
    "hardsigmoid_backward": (2, lambda grad, x: jnp.where((x > -3) & (x < 3), grad / 6, 0)),
    "hardswish": (1, lambda x: x * jnp.clip(x + 3, 0, 6) / 6),
    "hardswish_backward": (2, _hardswish_backward),
    "hardtanh": (1, lambda x, low=-1, high=1: jnp.minimum(jnp.maximum(x, low), high)),
    "hardtanh_backward": (2, lambda grad, x, low, high: jnp.where((x <= low) | (x >= high), 0, grad)),
    "leaky_relu": (1, _leaky_relu),
    "leaky_relu_backward": (2, lambda grad, x, slope, self_is_result: jnp.where(x > 0, grad, grad * slope)),
    "log_sigmoid_backward": (2, lambda grad, x, buffer: grad * jax.nn.sigmoid(-x)),
    "log_sigmoid_forward": (1, _log_sigmoid),
    "logit_backward": (2, _logit_backward),
    "mish": (1, lambda x: x * jnp.tanh(jax.nn.softplus(x))),
    "mish_backward": (2, _mish_backward),
    "sigmoid_backward": (2, lambda grad, y: grad * jnp.conj((1 - y) * y)),
    "silu": (1, lambda x: x * jax.nn.sigmoid(x)),
    "silu_backward": (2, _silu_backward),
    "softplus": (1, _softplus),
    "softplus_backward": (
        2,
        lambda grad, x, beta, limit: jnp.where(x * beta > limit, grad, grad * jax.nn.sigmoid(x * beta)),
    ),
    "softshrink": (1, lambda x, lambd=0.5: jnp.where(jnp.abs(x) <= lambd, 0, x - jnp.sign(x) * lambd)),
    "softshrink_backward": (2, _shrink_backward),
    "tanh_backward": (2, lambda grad, y: grad * jnp.conj(1 - y * y)),
    "threshold": (1, lambda x, limit, value: jnp.where(x <= limit, value, x)),
}
"""Operation -> how many of its first arguments are tensors, and its formula; its numbers are data.

In a backward formula the first argument is the incoming gradient; the other tensors are saved by the forward pass.
"""
_ONLY_COMPARES = frozenset(("hardsigmoid_backward", "hardtanh_backward", "leaky_relu_backward"))
"""Gradients for which XLA:TPU may recompute what is saved, from a convolution's output, instead of storing it."""


def _define(name: str, tensors: int, formula: Callable[..., Any]) -> None:
    not_saved = 1 if name.endswith("_backward") else tensors

    def lowering(*args: Any, platform: str = "cpu", **options: Any) -> Any:
        if not (name in _ONLY_COMPARES and platform == "tpu"):
            saved = (stored(x, platform) if hasattr(x, "dtype") else x for x in args[not_saved:])
            args = (*args[:not_saved], *saved)
        values = [up(materialize(x)) for x in args[:tensors]]
        numbers = [
            x if x is None or isinstance(x, (bool, str)) else as_dtype(x, values[0].dtype) for x in args[tensors:]
        ]
        return formula(*values, *numbers, **options)

    lowering.__name__ = lowering.__qualname__ = name
    register(name, takes=(Biased,))(lowering)


for _name, _row in FORMULAS.items():
    _define(_name, *_row)


@register("glu")
def glu(x: jax.Array, dim: int = -1) -> jax.Array:
    value, gate = jnp.split(up(x), 2, axis=dim)
    return value * jax.nn.sigmoid(gate)


@register("glu_backward")
def glu_backward(grad: jax.Array, x: jax.Array, dim: int, *, platform: str = "cpu") -> jax.Array:
    value, gate = jnp.split(up(stored(x, platform)), 2, axis=dim)
    grad, gate = up(grad), jax.nn.sigmoid(gate)
    return jnp.concatenate([grad * gate, grad * value * gate * (1 - gate)], axis=dim)


@register("glu_jvp")
def glu_jvp(glu: jax.Array, x: jax.Array, dx: jax.Array, dim: int) -> jax.Array:
    gate = jax.nn.sigmoid(jnp.split(up(x), 2, axis=dim)[1])
    dvalue, dgate = jnp.split(up(dx), 2, axis=dim)
    return dvalue * gate + up(glu) * (1 - gate) * dgate


@register("threshold_backward")
def threshold_backward(grad: jax.Array, x: jax.Array, limit: jax.Array, *, platform: str) -> jax.Array:
    """`x` is only compared, see `_ONLY_COMPARES`.  A normalization's sums and its gradient both read the result."""
    passed = jnp.where(up(x) <= as_dtype(limit, opmath(x.dtype)), jnp.zeros((), grad.dtype), grad)
    return written(passed, grad.dtype, platform)


@register("rrelu_with_noise_", mutates=("self", "noise"))
@register("rrelu_with_noise", mutates=("noise",))
def rrelu_with_noise(
    x: jax.Array, noise: jax.Array, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, *, rng: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Leaky ReLU; in training each element's slope is random, and saved in `noise` for the gradient."""
    x = up(x)
    lower, upper = as_dtype(lower, x.dtype), as_dtype(upper, x.dtype)
    if not training:
        return _leaky_relu(x, (lower + upper) / 2), noise
    slope = jax.random.uniform(rng, x.shape, x.dtype, lower, upper)
    slope = jnp.where(x <= 0, slope, 1)
    return x * slope, slope
