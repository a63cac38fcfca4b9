"""Special functions that are more than one JAX call: Bessel functions, Airy's function, orthogonal polynomials.

Bessel functions are integrals of smooth periodic or fast decaying functions, for which the trapezoidal rule converges
geometrically (Trefethen and Weideman 2014), so a small fixed number of nodes gives full precision without tables of
coefficients.  Source of the formulas: NIST Digital Library of Mathematical Functions, numbers in brackets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from xla_amp.lowering.operand import as_dtype, opmath
from xla_amp.lowering.registry import register

_EULER = float(np.euler_gamma)

# -- Bessel functions of the first and second kind, orders 0 and 1 ----------------------------------------------------

_FAR = 25.0
"""From here on the asymptotic series is exact to float64; below, the integral with `_NODES` is."""
_NODES = 128
_NEUMANN = 30
"""Terms of the series for the second kind: J_2k(25) is below 1e-16 from here on."""
_ASYMPTOTIC = 26


def _nodes() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sin t, weight, sum over k of -(-1)^k cos(2kt) / k) on a quarter of the circle; the rest repeats it."""
    quarter = _NODES // 4
    t = 2 * np.pi * np.arange(quarter + 1) / _NODES
    weight = np.full(quarter + 1, 4 / _NODES)
    weight[[0, -1]] /= 2
    k = np.arange(1, _NEUMANN + 1)
    series = np.cos(2 * np.outer(t, k)) @ (-((-1.0) ** k) / k)
    return np.sin(t), weight, series


_SINE, _WEIGHT, _SERIES = _nodes()


def _near(x: jax.Array, order: int, second: bool) -> jax.Array:
    """Integrals over the circle [10.9.1]; the second kind by its Neumann series [10.8.1, 10.23]."""
    s, weight, series = (np.asarray(v, x.dtype) for v in (_SINE, _WEIGHT, _SERIES))
    cosine, sine = jnp.cos(x[..., None] * s), jnp.sin(x[..., None] * s)
    j0, j1 = jnp.sum(weight * cosine, -1), jnp.sum(weight * s * sine, -1)
    if not second:
        return j1 if order else j0
    logarithm = (jnp.log(x / 2) + np.asarray(_EULER, x.dtype)) * np.asarray(2 / np.pi, x.dtype)
    four = np.asarray(4 / np.pi, x.dtype)
    if order == 0:
        result: jax.Array = logarithm * j0 + four * jnp.sum(weight * series * cosine, -1)
        return result
    # minus the derivative of order 0
    slope = jnp.sum(weight * series * s * sine, -1)
    result = logarithm * j1 - np.asarray(2 / np.pi, x.dtype) / x * j0 + four * slope
    return result


def _far(x: jax.Array, order: int, second: bool) -> jax.Array:
    """Hankel's expansion [10.17.3, 10.17.4]; the phase is split so that large x loses no precision."""
    term = 1.0
    parts: tuple[list[float], list[float]] = ([], [])
    for k in range(_ASYMPTOTIC):
        parts[k % 2].append(term * (-1) ** (k // 2))
        term *= (4 * order**2 - (2 * k + 1) ** 2) / (8 * (k + 1))
    square = 1 / (x * x)
    p, q = (jnp.polyval(np.asarray(part[::-1], x.dtype), square) for part in parts)
    q = q / x
    cosine, sine = jnp.cos(x), jnp.sin(x)
    c, s = (sine - cosine, -sine - cosine) if order else (cosine + sine, sine - cosine)
    wave = p * s + q * c if second else p * c - q * s
    return wave / jnp.sqrt(np.asarray(np.pi, x.dtype) * x)


def _bessel(order: int, second: bool) -> Callable[[jax.Array], jax.Array]:
    def function(x: jax.Array) -> jax.Array:
        size = jnp.abs(x)
        far = size > _FAR
        middle = np.asarray(_FAR, x.dtype)
        value = jnp.where(
            far,
            _far(jnp.where(far, size, middle), order, second),
            _near(jnp.where(far, middle, size), order, second),
        )
        value = jnp.where(jnp.isinf(size), 0, value)
        if second:
            return jnp.where(x < 0, jnp.nan, jnp.where(x == 0, -jnp.inf, value))
        return jnp.where(x < 0, -value, value) if order else value

    return function


# -- modified Bessel functions of the second kind, times exp(x) --------------------------------------------------------

_STEPS = 64
_TINY = 1e-5
"""Below this the integral would need more steps; two terms of the series are exact to float64."""
_DECAY = 40.0
"""The integral ends where its integrand has fallen by exp(-40)."""


def _scaled_k(order: int) -> Callable[[jax.Array], jax.Array]:
    """exp(x) K(x), the integral over t of exp(x - x cosh t) cosh(order t) [10.32.9]."""

    def function(x: jax.Array) -> jax.Array:
        safe = jnp.where(x > _TINY, x, 1)
        step = jnp.arccosh(1 + (_DECAY + 4 * order) / safe) / _STEPS
        t = step[..., None] * np.arange(_STEPS + 1, dtype=x.dtype)
        weight = np.ones(_STEPS + 1, x.dtype)
        weight[0] = 0.5
        half = jnp.sinh(t / 2)
        integrand = jnp.exp(-2 * safe[..., None] * half * half) * (jnp.cosh(t) if order else 1)
        integral = step * jnp.sum(weight * integrand, -1)
        small = jnp.where(x > _TINY, _TINY, x)
        logarithm = jnp.log(small / 2) + np.asarray(_EULER, x.dtype)  # [10.31.1, 10.31.2]
        square = small * small / 4
        series = 1 / small + small / 2 * (logarithm - 0.5) if order else square - logarithm * (1 + square)
        value = jnp.where(x > _TINY, integral, series * jnp.exp(small))
        value = jnp.where(jnp.isposinf(x), 0, value)
        return jnp.where(x < 0, jnp.nan, jnp.where(x == 0, jnp.inf, value))

    return function


def _unscaled_k(order: int) -> Callable[[jax.Array], jax.Array]:
    scaled = _scaled_k(order)
    return lambda x: jnp.where(jnp.isposinf(x), 0, scaled(x) * jnp.exp(-x))


_LARGE = 10.0
"""From here on twelve terms of the asymptotic series of erfcx [7.12.1] are exact to float64."""


def _erfcx(x: jax.Array) -> jax.Array:
    """exp(x^2) erfc(x).  JAX 0.10 wrongly returns 0 around x = 26.6."""
    large = jnp.where(x > _LARGE, x, _LARGE)
    terms = np.cumprod([1.0, *(-(2 * n - 1) / 2 for n in range(1, 13))])
    series = jnp.polyval(terms[::-1].astype(x.dtype), 1 / (large * large)) / (large * np.asarray(np.pi**0.5, x.dtype))
    return jnp.where(x > _LARGE, series, special.erfcx(jnp.minimum(x, _LARGE)))


def _spherical_j0(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isinf(x), 0, jnp.where(x == 0, 1, jnp.sin(x) / jnp.where(x == 0, 1, x)))


# -- Airy's function --------------------------------------------------------------------------------------------------

_AIRY_STEPS = 64
_AIRY_SERIES = 12
_AIRY_NEAR = 1.0
"""Up to this size of x the power series loses nothing to cancellation."""


def _airy_start(x: jax.Array) -> jax.Array:
    """The two power series [9.4.1]."""
    first, second = 0.355028053887817239, 0.258819403792806798  # Ai(0) and -Ai'(0) [9.2.3, 9.2.4]
    even, odd, cube = jnp.full_like(x, first), second * x, x * x * x
    total = even - odd
    for k in range(1, _AIRY_SERIES):
        even, odd = even * cube / ((3 * k - 1) * 3 * k), odd * cube / (3 * k * (3 * k + 1))
        total = total + (even - odd)
    return total


def _airy_decaying(x: jax.Array) -> jax.Array:
    """For x > 0, by the integral of K of order 1/3 [9.6.2, 10.32.9]."""
    zeta = 2 / 3 * x * jnp.sqrt(x)
    step = jnp.arccosh(1 + _DECAY / zeta) / _AIRY_STEPS
    t = step[..., None] * np.arange(_AIRY_STEPS + 1, dtype=x.dtype)
    weight = np.ones(_AIRY_STEPS + 1, x.dtype)
    weight[0] = 0.5
    half = jnp.sinh(t / 2)
    integrand = jnp.exp(-2 * zeta[..., None] * half * half) * jnp.cosh(t / 3)
    return jnp.sqrt(x / 3) / np.pi * jnp.exp(-zeta) * step * jnp.sum(weight * integrand, -1)


def _airy_oscillating(size: jax.Array) -> jax.Array:
    """For x = -size, by the integral [9.5.1] along the path of steepest descent through its saddle at sqrt(size).

    With s = sqrt(size) and zeta = 2/3 s^3 the path is 2 s cosh(y / 3 + i pi / 3), y = a - i atan(sinh a), on which the
    exponent is -i zeta - zeta sinh a tanh a; points a and -a are taken together.
    """
    root = jnp.sqrt(size)
    zeta = 2 / 3 * size * root
    step = jnp.arcsinh(jnp.sqrt(_DECAY / zeta) + _DECAY / zeta) / _AIRY_STEPS
    a = step[..., None] * np.arange(_AIRY_STEPS + 1, dtype=size.dtype)
    weight = np.ones(_AIRY_STEPS + 1, size.dtype)
    weight[0] = 0.5
    turned = jnp.arctan(jnp.sinh(a))
    # sinh(i pi / 3 + y / 3) (1 - i / cosh a), at a and -a: real and imaginary parts
    decay = weight * jnp.exp(-zeta[..., None] * jnp.sinh(a) * jnp.tanh(a))
    slope = 1 / jnp.cosh(a)
    parts = []
    for sign in (1, -1):
        angle = np.pi / 3 - sign * turned / 3
        real, imaginary = sign * jnp.sinh(a / 3) * jnp.cos(angle), jnp.cosh(a / 3) * jnp.sin(angle)
        parts.append((real + imaginary * slope, imaginary - real * slope))
    real, imaginary = (step * jnp.sum(decay * (p + q), -1) for p, q in zip(*parts, strict=True))
    return 2 / 3 * root / np.pi * (jnp.cos(zeta) * real + jnp.sin(zeta) * imaginary)


def _airy(x: jax.Array) -> jax.Array:
    """Ai(x); NaN at both infinities, as in torch."""
    size = jnp.abs(x)
    far = jnp.where(size > _AIRY_NEAR, size, _AIRY_NEAR)
    value = jnp.where(x > 0, _airy_decaying(far), _airy_oscillating(far))
    value = jnp.where(size > _AIRY_NEAR, value, _airy_start(jnp.clip(x, -_AIRY_NEAR, _AIRY_NEAR)))
    return jnp.where(jnp.isfinite(x), value, jnp.nan)


UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "special_airy_ai": _airy,
    "special_bessel_j0": _bessel(0, False),
    "special_bessel_j1": _bessel(1, False),
    "special_bessel_y0": _bessel(0, True),
    "special_bessel_y1": _bessel(1, True),
    "special_erfcx": _erfcx,
    "special_modified_bessel_i0": special.i0,
    "special_modified_bessel_i1": special.i1,
    "special_modified_bessel_k0": _unscaled_k(0),
    "special_modified_bessel_k1": _unscaled_k(1),
    "special_scaled_modified_bessel_k0": _scaled_k(0),
    "special_scaled_modified_bessel_k1": _scaled_k(1),
    "special_spherical_bessel_j0": _spherical_j0,
}


def _unary(function: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, *, out: function(as_dtype(x, opmath(out.dtype)))


for _name, _function in UNARY.items():
    register(_name)(_unary(_function))


# -- orthogonal polynomials: p_0 = 1, p_1, and p_(k+1) from k, x and the two before ------------------------------------

First = Callable[[jax.Array], jax.Array]
Next = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


def _chebyshev(k: Any, x: jax.Array, q: jax.Array, p: jax.Array) -> jax.Array:
    return 2 * x * q - p


POLYNOMIALS: dict[str, tuple[First, Next]] = {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev),
    "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev),
    "hermite_polynomial_h": (lambda x: 2 * x, lambda k, x, q, p: 2 * x * q - 2 * k * p),
    "hermite_polynomial_he": (lambda x: x, lambda k, x, q, p: x * q - k * p),
    "laguerre_polynomial_l": (lambda x: 1 - x, lambda k, x, q, p: ((2 * k + 1 - x) * q - k * p) / (k + 1)),
    "legendre_polynomial_p": (lambda x: x, lambda k, x, q, p: ((2 * k + 1) * x * q - k * p) / (k + 1)),
}
"""torch's names without ``special_`` -> (p_1, recurrence)."""


def _polynomial(first: First, following: Next, shifted: bool) -> Callable[..., jax.Array]:
    def lowering(x: Any, n: Any, *, out: Any) -> jax.Array:
        dtype = opmath(out.dtype)
        x, n = jnp.broadcast_arrays(as_dtype(x, dtype), as_dtype(n, np.int64))
        x = 2 * x - 1 if shifted else x
        one = jnp.ones_like(x)

        def step(state: Any) -> Any:
            k, q, p, value = state
            q, p = following(as_dtype(k, dtype), x, q, p), q
            return k + 1, q, p, jnp.where(n == k + 1, q, value)

        start = (jnp.ones((), np.int64), first(x), one, jnp.where(n <= 0, as_dtype(n == 0, dtype), first(x)))
        return lax.while_loop(lambda state: state[0] < jnp.max(n, initial=0), step, start)[3]

    return lowering


for _name, (_first, _next) in POLYNOMIALS.items():
    register(f"special_{_name}")(_polynomial(_first, _next, False))
    if _name.startswith("chebyshev"):
        register(f"special_shifted_{_name}")(_polynomial(_first, _next, True))
