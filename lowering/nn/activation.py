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


def _define(
    name: str, tensors: int = 1, *, compare_only: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a formula whose first `tensors` arguments are tensors and whose numbers are data.

    In a backward formula the first argument is the incoming gradient; the other tensors are saved by the forward pass.
    If it only compares them (`compare_only`), XLA:TPU may recompute them, from a convolution's output, instead of
    storing them.
    """
    not_saved = 1 if name.endswith("_backward") else tensors

    def decorate(formula: Callable[..., Any]) -> Callable[..., Any]:
        def lowering(*args: Any, platform: str = "cpu", **options: Any) -> Any:
            if not (compare_only and platform == "tpu"):
                saved = (stored(x, platform) if hasattr(x, "dtype") else x for x in args[not_saved:])
                args = (*args[:not_saved], *saved)
            values = [up(materialize(x)) for x in args[:tensors]]
            numbers = [
                x if x is None or isinstance(x, (bool, str)) else as_dtype(x, values[0].dtype) for x in args[tensors:]
            ]
            return formula(*values, *numbers, **options)

        # No `functools.wraps`: `register` must see the wrapper's signature, which has `platform`.
        lowering.__name__, lowering.__qualname__, lowering.__doc__ = name, name, formula.__doc__
        return register(name, takes=(Biased,))(lowering)

    return decorate


# -- smooth -----------------------------------------------------------------------------------------------------------


@_define("sigmoid_backward", 2)
def sigmoid_backward(grad: Any, y: Any) -> Any:
    return grad * jnp.conj((1 - y) * y)


@_define("tanh_backward", 2)
def tanh_backward(grad: Any, y: Any) -> Any:
    return grad * jnp.conj(1 - y * y)


@_define("logit_backward", 2)
def logit_backward(grad: Any, x: Any, eps: Any = None) -> Any:
    inside = (x >= 0) & (x <= 1) if eps is None else (x >= eps) & (x <= 1 - eps)
    return jnp.where(inside, grad / (x * (1 - x)), jnp.nan if eps is None else 0)


@_define("gelu")
def gelu(x: Any, *, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@_define("gelu_backward", 2)
def gelu_backward(grad: Any, x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        # 1 + tanh(u) = 2 sigmoid(2u), 1 - tanh(u) ** 2 = 4 sigmoid(2u) sigmoid(-2u): no digits are lost at the ends
        twice = 2 * _SQRT_2_OVER_PI * (x + _TANH_CUBIC * x * x * x)
        slope = 2 * _SQRT_2_OVER_PI * (1 + 3 * _TANH_CUBIC * x * x)
        return grad * jax.nn.sigmoid(twice) * (1 + x * slope * jax.nn.sigmoid(-twice))
    density = jnp.exp(-0.5 * x * x) * (0.5 * _SQRT_2_OVER_PI)
    return grad * (0.5 * (1 + lax.erf(x * _SQRT_HALF)) + x * density)


@_define("silu")
def silu(x: Any) -> Any:
    return x * jax.nn.sigmoid(x)


@_define("silu_backward", 2)
def silu_backward(grad: Any, x: Any) -> Any:
    gate = jax.nn.sigmoid(x)
    return grad * gate * (1 + x * (1 - gate))


@_define("mish")
def mish(x: Any) -> Any:
    return x * jnp.tanh(jax.nn.softplus(x))


@_define("mish_backward", 2)
def mish_backward(grad: Any, x: Any) -> Any:
    gate = jnp.tanh(jax.nn.softplus(x))
    return grad * (gate + x * jax.nn.sigmoid(x) * (1 - gate * gate))


@_define("softplus")
def softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta)


@_define("softplus_backward", 2)
def softplus_backward(grad: Any, x: Any, beta: Any, threshold: Any) -> Any:
    return jnp.where(x * beta > threshold, grad, grad * jax.nn.sigmoid(x * beta))


@_define("log_sigmoid_forward")
def log_sigmoid_forward(x: Any) -> tuple[Any, Any]:
    """``log(sigmoid(x))`` and torch's buffer ``exp(-|x|)``."""
    buffer = jnp.exp(-jnp.abs(x))
    return jnp.minimum(x, 0) - jnp.log1p(buffer), buffer


@_define("log_sigmoid_backward", 2)
def log_sigmoid_backward(grad: Any, x: Any, buffer: Any) -> Any:
    return grad * jax.nn.sigmoid(-x)


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


# -- piecewise, with exponentials -------------------------------------------------------------------------------------


@_define("elu")
def elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    # Clamp the exponential's argument: it would overflow for positive numbers, where its value is not used.
    return jnp.where(x > 0, x * scale, jnp.expm1(jnp.minimum(x, 0) * input_scale) * (alpha * scale))


@_define("elu_backward", 1)
def elu_backward(grad: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, value: Any) -> Any:
    low = alpha * scale
    below = value + low if is_result else low * jnp.exp(jnp.minimum(value, 0) * input_scale)
    return jnp.where(value > 0, grad * scale, grad * input_scale * below)


# -- piecewise linear -------------------------------------------------------------------------------------------------


@_define("leaky_relu")
def leaky_relu(x: Any, negative_slope: Any = 0.01) -> Any:
    return jnp.where(x > 0, x, x * negative_slope)


@_define("leaky_relu_backward", 2, compare_only=True)
def leaky_relu_backward(grad: Any, x: Any, negative_slope: Any, self_is_result: bool) -> Any:
    return jnp.where(x > 0, grad, grad * negative_slope)


@_define("_prelu_kernel", 2)
def prelu_kernel(x: Any, weight: Any) -> Any:
    return jnp.where(x > 0, x, weight * x)


@_define("_prelu_kernel_backward", 3)
def prelu_kernel_backward(grad: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    return jnp.where(x > 0, grad, weight * grad), jnp.where(x > 0, 0, x * grad)


@_define("hardtanh")
def hardtanh(x: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    return jnp.minimum(jnp.maximum(x, min_val), max_val)


@_define("hardtanh_backward", 2, compare_only=True)
def hardtanh_backward(grad: Any, x: Any, min_val: Any, max_val: Any) -> Any:
    return jnp.where((x <= min_val) | (x >= max_val), 0, grad)


@_define("hardswish")
def hardswish(x: Any) -> Any:
    return x * jnp.clip(x + 3, 0, 6) / 6


@_define("hardswish_backward", 2)
def hardswish_backward(grad: Any, x: Any) -> Any:
    return jnp.where(x <= -3, 0, jnp.where(x < 3, grad * (x / 3 + 0.5), grad))


@_define("hardsigmoid")
def hardsigmoid(x: Any) -> Any:
    return jnp.clip(x + 3, 0, 6) / 6


@_define("hardsigmoid_backward", 2, compare_only=True)
def hardsigmoid_backward(grad: Any, x: Any) -> Any:
    return jnp.where((x > -3) & (x < 3), grad / 6, 0)


@_define("threshold")
def threshold(x: Any, limit: Any, value: Any) -> Any:
    return jnp.where(x <= limit, value, x)


@register("threshold_backward")
def threshold_backward(grad: jax.Array, x: jax.Array, limit: jax.Array, *, platform: str) -> jax.Array:
    """`x` is only compared, see `_define`.  A normalization's sums and its gradient both read the result."""
    passed = jnp.where(up(x) <= as_dtype(limit, opmath(x.dtype)), jnp.zeros((), grad.dtype), grad)
    return written(passed, grad.dtype, platform)


@_define("hardshrink")
def hardshrink(x: Any, lambd: Any = 0.5) -> Any:
    return jnp.where(jnp.abs(x) <= lambd, 0, x)


@_define("softshrink")
def softshrink(x: Any, lambd: Any = 0.5) -> Any:
    return jnp.where(jnp.abs(x) <= lambd, 0, x - jnp.sign(x) * lambd)


def _shrink_backward(grad: Any, x: Any, lambd: Any) -> Any:
    return jnp.where(jnp.abs(x) <= lambd, 0, grad)


for _name in ("hardshrink_backward", "softshrink_backward"):
    _define(_name, 2)(_shrink_backward)


# -- random -----------------------------------------------------------------------------------------------------------


@register("rrelu_with_noise", mutates=("noise",))
def rrelu_with_noise(
    x: jax.Array, noise: jax.Array, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, *, rng: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Leaky ReLU; in training each element's slope is random, and saved in `noise` for the gradient."""
    x = up(x)
    lower, upper = as_dtype(lower, x.dtype), as_dtype(upper, x.dtype)
    if not training:
        return leaky_relu(x, (lower + upper) / 2), noise
    slope = jax.random.uniform(rng, x.shape, x.dtype, lower, upper)
    slope = jnp.where(x <= 0, slope, 1)
    return x * slope, slope
