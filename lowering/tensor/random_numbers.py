"""Random operations: dropout, in-place fills, sampling.

Each call gets a separate key (`rng`) and is a pure function of it; the numbers are JAX's, not those of torch's
generators.  The parameters of the in-place fills are data (*lifted*), so initializing layers with different bounds
shares one program per shape.  Halves are drawn in float32 and rounded, except uniform ones, which must stay below
their upper bound and are multiples of the same power of two as torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from xla_amp.lowering.operand import as_dtype, is_half, opmath, up
from xla_amp.lowering.registry import register

_Function = TypeVar("_Function", bound=Callable[..., Any])

_WORD = 2**32


def _float(dtype: Any) -> np.dtype:
    """The dtype in which numbers for a tensor of `dtype` are drawn."""
    return np.dtype(np.float32) if np.dtype(dtype).kind in "iub" else opmath(dtype)


def coin(rng: Any, probability: Any, shape: Sequence[int]) -> jax.Array:
    """Booleans that are true with `probability` (a number or an array), to within 2**-32."""
    shape = tuple(shape)
    bits = jax.random.bits(rng, shape, jnp.uint32)
    if isinstance(probability, (int, float)):
        number = round(probability * _WORD)
        return jnp.ones(shape, jnp.bool_) if number >= _WORD else bits < jnp.uint32(max(number, 0))
    words = jnp.round(as_dtype(probability, jnp.float64) * _WORD)
    below = bits < as_dtype(jnp.clip(words, 0, _WORD - 1), jnp.uint32)
    return below | jnp.broadcast_to(words >= _WORD, shape)


# -- dropout ----------------------------------------------------------------------------------------------------------


@register("native_dropout", dynamic=("p",))
def native_dropout(x: jax.Array, p: Any, train: bool | None, *, rng: Any) -> tuple[jax.Array, jax.Array]:
    """`x` with elements zeroed at probability `p` and the rest scaled by 1 / (1 - p); and the mask of kept elements."""
    if train is False:
        return x, jnp.ones(x.shape, jnp.bool_)
    keep = coin(rng, 1 - p, x.shape)
    x = up(x)
    scale = 0.0 if isinstance(p, (int, float)) and p == 1 else 1 / (1 - p)
    return jnp.where(keep, x * as_dtype(scale, x.dtype), jnp.zeros((), x.dtype)), keep


@register("native_dropout_backward", dynamic=("scale",))
def native_dropout_backward(grad: jax.Array, mask: jax.Array, scale: Any) -> jax.Array:
    """The gradient where the mask is true, scaled."""
    grad = up(grad)
    return jnp.where(mask, grad * as_dtype(scale, grad.dtype), jnp.zeros((), grad.dtype))


# -- fills of a tensor in place ---------------------------------------------------------------------------------------


def _fill(name: str, *lifted: str, dynamic: Sequence[str] = ()) -> Callable[[_Function], _Function]:
    return register(name, mutates=("self",), lifted=lifted, dynamic=dynamic)


@_fill("uniform_", "from", "to")
def uniform_(x: jax.Array, low: Any = 0.0, high: Any = 1.0, *, rng: Any) -> jax.Array:
    """Uniform in [low, high)."""
    wide = _float(x.dtype)
    low, high = as_dtype(low, wide), as_dtype(high, wide)
    if is_half(x.dtype):  # JAX draws one bit less than torch
        bits = jnp.finfo(x.dtype).nmant + 1
        drawn = as_dtype(jax.random.bits(rng, x.shape, jnp.uint16) >> (16 - bits), wide) * wide.type(2.0**-bits)
    else:
        drawn = jax.random.uniform(rng, x.shape, wide)
    value = as_dtype(low + drawn * (high - low), x.dtype)
    return jnp.where(as_dtype(value, wide) >= high, as_dtype(low, x.dtype), value)  # rounding can reach the upper bound


def _normal(rng: Any, shape: Sequence[int], dtype: Any, mean: Any = 0.0, std: Any = 1.0) -> jax.Array:
    return as_dtype(mean, dtype) + as_dtype(std, dtype) * jax.random.normal(rng, tuple(shape), dtype)


def _log_normal(rng: Any, shape: Sequence[int], dtype: Any, mean: Any = 1.0, std: Any = 2.0) -> jax.Array:
    return jnp.exp(_normal(rng, shape, dtype, mean, std))


def _exponential(rng: Any, shape: Sequence[int], dtype: Any, rate: Any = 1.0) -> jax.Array:
    """Half of epsilon where 0 is drawn, as on CUDA: its log is finite, and no outlier."""
    drawn = jnp.maximum(jax.random.exponential(rng, shape, dtype), jnp.finfo(dtype).eps / 2)
    return drawn / as_dtype(rate, dtype)


def _geometric(rng: Any, shape: Sequence[int], dtype: Any, p: Any) -> jax.Array:
    """The number of trials up to the first success, from 1."""
    drawn = 1 - jax.random.uniform(rng, shape, dtype)  # in (0, 1]
    return jnp.maximum(jnp.ceil(jnp.log(drawn) / jnp.log1p(-as_dtype(p, dtype))), 1)


def _cauchy(rng: Any, shape: Sequence[int], dtype: Any, median: Any = 0.0, sigma: Any = 1.0) -> jax.Array:
    return as_dtype(median, dtype) + as_dtype(sigma, dtype) * jax.random.cauchy(rng, shape, dtype)


DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], Callable[..., jax.Array]]] = {
    "cauchy_": (("median", "sigma"), _cauchy),
    "exponential_": (("lambd",), _exponential),
    "geometric_": (("p",), _geometric),
    "log_normal_": (("mean", "std"), _log_normal),
    "normal_": (("mean", "std"), _normal),
}
"""Fill -> its parameters, and what draws (key, shape, dtype, *parameters)."""


_LEAST: dict[str, Callable[[Any], Any]] = {
    "_standard_gamma": lambda dtype: jnp.finfo(dtype).tiny,
    "exponential_": lambda dtype: 2.0**-24 if dtype == jnp.float16 else jnp.finfo(dtype).tiny,
}
"""Operation -> the least number that it gives, as in torch: rounding to a dtype never gives 0."""


def _drawn(name: str, value: jax.Array, dtype: Any) -> jax.Array:
    return jnp.maximum(value, _LEAST[name](dtype)) if name in _LEAST else value


def _in_float(name: str, draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, *parameters, rng: _drawn(name, draw(rng, x.shape, _float(x.dtype), *parameters), x.dtype)


@register("bernoulli.Tensor", "bernoulli.p", lifted=("p",))
@_fill("bernoulli_.Tensor")
@_fill("bernoulli_.float", "p")
def bernoulli_by(x: jax.Array, p: Any = 0.5, *, rng: Any) -> jax.Array:
    """1 with probability `p`, a number or an array, otherwise 0; shape and dtype of `x`."""
    return as_dtype(coin(rng, p, x.shape), x.dtype)


@_fill("random_")
def random_(x: jax.Array, *, rng: Any) -> jax.Array:
    """Integers of the dtype's non-negative range; for floats, up to the largest range of exact integers."""
    if x.dtype == jnp.bool_:
        return coin(rng, 0.5, x.shape)
    if x.dtype.kind in "iu":
        return as_dtype(jax.random.bits(rng, x.shape, jnp.uint64) & jnp.uint64(jnp.iinfo(x.dtype).max), x.dtype)
    return _integers(rng, 0, 2 ** (jnp.finfo(x.dtype).nmant + 1) + 1, x.shape)


@_fill("random_.from", dynamic=("from", "to"))
def random_from_(x: jax.Array, low: Any, high: Any, *, rng: Any) -> jax.Array:
    """Integers in [low, high)."""
    if high is None:
        high = int(jnp.iinfo(x.dtype).max if x.dtype.kind in "iu" else 2 ** (jnp.finfo(x.dtype).nmant + 1)) + 1
    return _integers(rng, low, high, x.shape)


@_fill("random_.to", dynamic=("to",))
def random_to_(x: jax.Array, high: Any, *, rng: Any) -> jax.Array:
    """Integers in [0, high)."""
    return _integers(rng, 0, high, x.shape)


def _integers(rng: Any, low: Any, high: Any, shape: Sequence[int]) -> jax.Array:
    if not (isinstance(low, int) and isinstance(high, int)):  # the same numbers as for constants
        wide = as_dtype(high, jnp.uint64) - as_dtype(low, jnp.uint64)
        small = as_dtype(jax.random.randint(rng, tuple(shape), 0, wide.astype(jnp.int32), jnp.int32), jnp.int64)
        bits = jax.random.bits(rng, tuple(shape), jnp.uint64)
        bits = jnp.where(
            wide == 0, bits, bits % jnp.maximum(wide, 1)
        )  # 0: all of them, and a remainder of 0 is undefined
        values: jax.Array = low + jnp.where((wide > 0) & (wide < _WORD >> 1), small, as_dtype(bits, jnp.int64))
        return values
    span = high - low
    if span < _WORD >> 1:
        return low + as_dtype(jax.random.randint(rng, tuple(shape), 0, span, jnp.int32), jnp.int64)
    bits = jax.random.bits(rng, tuple(shape), jnp.uint64)
    return as_dtype(bits % jnp.uint64(span) if span < 2**64 else bits, jnp.int64) + low


# -- new tensors ------------------------------------------------------------------------------------------------------


@register("bernoulli")
def bernoulli(x: jax.Array, *, rng: Any) -> jax.Array:
    """1 with the element's probability in `x`, otherwise 0."""
    return bernoulli_by(x, x, rng=rng)


@register("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", lifted=("mean", "std"))
def normal(mean: Any, std: Any = 1.0, *, rng: Any, out: Any) -> jax.Array:
    """Normal numbers with a mean and a standard deviation for each element."""
    return _normal(rng, out.shape, _float(out.dtype), mean, std)


@register("normal.float_float", lifted=("mean", "std"))
def normal_of_size(mean: Any, std: Any, size: Sequence[int], *, dtype: Any = None, rng: Any, out: Any) -> jax.Array:
    """Normal numbers with one mean and standard deviation."""
    return _normal(rng, out.shape, _float(out.dtype), mean, std)


@register("randperm", "randperm.generator")
def randperm(n: int, *, dtype: Any = None, rng: Any) -> jax.Array:
    """A random order of 0 .. n - 1."""
    return jax.random.permutation(rng, n)


@register("multinomial")
def multinomial(weights: jax.Array, num_samples: int, replacement: bool = False, *, rng: Any) -> jax.Array:
    """Indices drawn by the rows' weights, which need not sum to one; weight 0 is drawn only after all others.

    Without replacement: the greatest of log-weights plus Gumbel noise (Kool, van Hoof, Welling 2019, "Stochastic beams
    and where to find them").  With replacement: the inverse of the cumulative weights.
    """
    wide = up(weights)
    if not replacement or num_samples == 1:
        keys = jnp.log(wide) + jax.random.gumbel(rng, wide.shape, wide.dtype)
        return lax.top_k(keys, num_samples)[1]
    cumulative = jnp.cumsum(wide.reshape(-1, wide.shape[-1]), axis=-1)
    total = cumulative[:, -1:]
    drawn = jax.random.uniform(rng, (cumulative.shape[0], num_samples), wide.dtype) * total
    # Rounding can reach the total, which could select a category of weight 0: stay below it.
    drawn = jnp.minimum(drawn, jnp.nextafter(total, jnp.zeros((), wide.dtype)))
    search: Callable[[jax.Array, jax.Array], jax.Array] = jax.vmap(functools.partial(jnp.searchsorted, side="right"))
    return search(cumulative, drawn).reshape(*weights.shape[:-1], num_samples)


SAMPLERS: dict[str, Callable[..., jax.Array]] = {
    "_sample_dirichlet": jax.random.dirichlet,
    "_standard_gamma": jax.random.gamma,
    "binomial": jax.random.binomial,
    "poisson": lambda rng, rate, dtype: as_dtype(jax.random.poisson(rng, rate), dtype),
}
"""Operation -> what draws (key, *parameters, dtype=) with arrays of parameters."""


def _of_arrays(name: str, draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def sample(first: jax.Array, *parameters: jax.Array, rng: Any) -> jax.Array:
        value = draw(rng, *map(up, (first, *parameters)), dtype=opmath(first.dtype))
        return _drawn(name, value, first.dtype)

    return sample


@register("_standard_gamma_grad")
def standard_gamma_grad(shape: jax.Array, sample: jax.Array) -> jax.Array:
    """Derivative of a gamma number by its shape parameter (implicit reparameterization)."""
    gradient: jax.Array = lax.random_gamma_grad(up(shape), up(sample))
    return gradient


_STEP = 0.1
_SINH = np.pi * np.sinh(np.arange(-7.0, 3.3, _STEP))
_LOG_POSITIONS = -np.logaddexp(0, -_SINH)
_LOG_WEIGHTS = np.log(_STEP * np.pi * np.cosh(np.arange(-7.0, 3.3, _STEP))) + _LOG_POSITIONS - np.logaddexp(0, _SINH)
"""Double exponential rule, for functions with singularities at the ends of (0, 1), or all of whose mass is near 0."""


@register("_dirichlet_grad")
def dirichlet_grad(x: jax.Array, alpha: jax.Array, total: jax.Array) -> jax.Array:
    """``-(d/dalpha cdf(x)) / pdf(x) / (1 - x)`` of Beta(alpha, total - alpha), in float64.

    The derivative of the distribution function is the integral of ``pdf(t) * (log(t) + digamma(total) -
    digamma(alpha))`` over t, from 0 to x, or from x to 1 with the other sign where x is above the mean: there the
    integrand has one sign and falls from its end at x.  It is integrated over ``(t / x) ** alpha``, from 0 to 1.
    """
    x, alpha, total = (as_dtype(value, jnp.float64) for value in (x, alpha, total))
    x = jnp.clip(x, jnp.finfo(jnp.float64).tiny, 1 - jnp.finfo(jnp.float64).eps)
    lower = x <= alpha / total
    end, power = jnp.where(lower, x, 1 - x), jnp.where(lower, alpha, total - alpha)
    shift, other = special.digamma(total) - special.digamma(alpha), jnp.where(lower, total - alpha, alpha) - 1

    def add(node: jax.Array, integral: jax.Array) -> jax.Array:
        log_position = jnp.asarray(_LOG_POSITIONS)[node] / power
        t = end * jnp.exp(log_position)
        log_t = jnp.where(lower, jnp.log(end) + log_position, jnp.log1p(-t))
        rest = other * (jnp.log1p(-t) - jnp.log1p(-end))
        return integral + jnp.exp(jnp.asarray(_LOG_WEIGHTS)[node] + rest) * (log_t + shift)

    integral = lax.fori_loop(0, len(_SINH), add, jnp.zeros_like(end)) * end / power
    return -jnp.where(lower, integral, -integral) / (1 - x)


for _name, (_parameters, _draw) in DISTRIBUTIONS.items():
    _fill(_name, *_parameters)(_in_float(_name, _draw))
for _name, _draw in SAMPLERS.items():
    register(_name)(_of_arrays(_name, _draw))
