"""Operations on lists of tensors (``_foreach_*``), applied to each entry; the inf check and the loss scale.

List arguments are taken entry by entry, all others are shared.  Each row has a functional and an in-place variant
(``_foreach_add.List``, ``_foreach_add_.List``); numbers are data in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.common import loss_scaling
from xla_amp.lowering.math import elementwise, reduction  # noqa: F401  (the rows below name their operations)
from xla_amp.lowering.operand import as_dtype, up
from xla_amp.lowering.registry import find, register

Single = Callable[..., Any]
"""(the entry's arguments, *, out: shape and dtype of the entry's result) -> result."""

_THREE = ("List", "Scalar", "ScalarList")
_FOUR = (*_THREE, "Tensor")

BINARY: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "add": ("add.Tensor", "add.Scalar", _FOUR),
    "clamp_max": ("clamp_max.Tensor", "clamp_max", _THREE),
    "clamp_min": ("clamp_min.Tensor", "clamp_min", _THREE),
    "div": ("div.Tensor", "div.Scalar", _FOUR),
    "lerp": ("lerp.Tensor", "lerp.Scalar", _THREE),
    "maximum": ("maximum", "maximum", _THREE),
    "minimum": ("minimum", "minimum", _THREE),
    "mul": ("mul.Tensor", "mul.Scalar", _FOUR),
    # a number as exponent is data here, unlike in pow.Tensor_Scalar
    "pow": ("pow.Tensor_Tensor", "pow.Tensor_Tensor", _THREE),
    "sub": ("sub.Tensor", "sub.Scalar", _THREE),
}
"""Name -> (operation with a tensor, operation with a number, overloads)."""

UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma"),
    *("log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh"),
    *("sqrt", "tan", "tanh", "trunc"),
)
"""Names of operations on single tensors; each has the overload without a name."""


def _single(name: str) -> Single:
    """The lowering of an operation on single tensors; torch computes in the result's dtype."""

    def call(*args: Any, out: jax.ShapeDtypeStruct, **options: Any) -> Any:
        lowering = find(name)
        if lowering is None:
            raise LookupError(f"a _foreach operation needs the lowering of {name!r}, which is not registered")
        supplies = {"out": out, "common": out.dtype}
        wanted = {key: value for key, value in supplies.items() if key in lowering.supplies}
        return lowering.function(*args, **options, **wanted)

    return call


def _each(single: Single) -> Callable[..., list[Any]]:
    def lowering(*args: Any, outs: Sequence[jax.ShapeDtypeStruct], **options: Any) -> list[Any]:
        entries = zip(*(arg if isinstance(arg, list) else [arg] * len(outs) for arg in args), strict=True)
        return [single(*entry, out=out, **options) for entry, out in zip(entries, outs, strict=True)]

    return lowering


def _define(name: str, overload: str, single: Single, *, inplace: bool = True, static: tuple[str, ...] = ()) -> None:
    suffix = f".{overload}" if overload else ""
    register(f"_foreach_{name}{suffix}", static=static)(_each(single))
    if inplace:
        register(f"_foreach_{name}_{suffix}", mutates=("self",), static=static)(_each(single))


for _name, (_with_tensor, _with_number, _overloads) in BINARY.items():
    for _overload in _overloads:
        _define(_name, _overload, _single(_with_tensor if _overload in ("List", "Tensor") else _with_number))

for _name in UNARY:
    _define(_name, "", _single(_name))

_define("pow", "ScalarAndTensor", _single("pow.Tensor_Tensor"), inplace=False)
_define("max", "", _single("max"), inplace=False)
_define("norm", "Scalar", _single("linalg_vector_norm"), inplace=False, static=("ord",))


def _scaled_product(name: str) -> tuple[Single, Single]:
    """``addcmul`` or ``addcdiv`` with the factor as last argument, or as the entry of one tensor of factors."""
    single = _single(name)

    def with_value(x: Any, first: Any, second: Any, value: Any = 1, *, out: jax.ShapeDtypeStruct) -> Any:
        return single(x, first, second, value=value, out=out)

    def with_values(xs: Any, firsts: Any, seconds: Any, values: jax.Array, *, outs: Any) -> list[Any]:
        return _each(with_value)(xs, firsts, seconds, [values[i] for i in range(len(xs))], outs=outs)

    return with_value, with_values


for _name in ("addcdiv", "addcmul"):
    _with_value, _with_values = _scaled_product(_name)
    _define(_name, "Scalar", _with_value)
    _define(_name, "ScalarList", _with_value)
    register(f"_foreach_{_name}.Tensor")(_with_values)
    register(f"_foreach_{_name}_.Tensor", mutates=("self",))(_with_values)


def _zero(x: jax.Array, *, out: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(out.shape, out.dtype)


def _copy(x: jax.Array, source: jax.Array, non_blocking: bool = False, *, out: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.broadcast_to(as_dtype(source, out.dtype), out.shape)


def _clone(x: jax.Array, *, out: jax.ShapeDtypeStruct) -> jax.Array:
    return x


_define("zero", "", _zero)
_define("copy", "", _copy)
_define("clone", "", _clone, inplace=False)


# ---- loss scaling ----------------------------------------------------------------------------------------------------


@register("_amp_foreach_non_finite_check_and_unscale_", mutates=("self", "found_inf"))
def non_finite_check_and_unscale(
    grads: Sequence[jax.Array], found_inf: jax.Array, inv_scale: jax.Array, *, replicas: str | None
) -> list[jax.Array]:
    """Gradients times `inv_scale`, and `found_inf`, which becomes 1 if a gradient is not finite.

    A flag that is set stays set.  If one of several processes finds an overflow, the flag is set in all, so that all
    skip the same steps, also when their gradients were not reduced.  The product is formed in the opmath dtype and
    rounded once.  The check reads the gradients before the product, so an overflow that an `inv_scale` above 1 causes
    is not found, as in torch.
    """

    @jax.jit  # traced once for all gradients of a shape
    def checked(grad: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = up(grad)
        return jnp.all(jnp.isfinite(grad)), lax.mul(wide, as_dtype(scale, wide.dtype))

    scale = inv_scale.reshape(())
    pairs = [checked(grad, scale) for grad in grads]
    finite, unscaled = [is_finite for is_finite, _ in pairs], [product for _, product in pairs]
    # XLA must not fuse the reduction of all flags into every update that reads it: such a program grows with the
    # square of the number of gradients.  The barrier prevents that, except on XLA:CPU, which drops it early and
    # expands a reduction of stacked flags into a chain of operations; the negation between the two prevents this.
    found = jnp.any(~jnp.stack(finite)) if finite else jnp.zeros((), bool)
    if replicas is not None:
        found = jax.lax.pmax(found.astype(jnp.int32), replicas) != 0
    found = jax.lax.optimization_barrier(found)
    return [*unscaled, jnp.where(found, jnp.ones((), found_inf.dtype), found_inf)]


def _multiply(scale: jax.Array, factor: Any) -> jax.Array:
    """The product formed in float64 and rounded once, as torch does."""
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)
    return as_dtype(as_dtype(scale, wide) * as_dtype(factor, wide), scale.dtype)


@register(
    "_amp_update_scale_",
    mutates=("self", "growth_tracker"),
    lifted=("scale_growth_factor", "scale_backoff_factor"),
)
def update_scale(
    scale: jax.Array,
    growth_tracker: jax.Array,
    found_inf: jax.Array,
    scale_growth_factor: Any,
    scale_backoff_factor: Any,
    growth_interval: Any,
) -> tuple[jax.Array, jax.Array]:
    """The next scale and growth tracker: `xla_amp.common.loss_scaling.update`."""
    return loss_scaling.update(
        scale,
        growth_tracker,
        found_inf.reshape(()),
        scale_growth_factor,
        scale_backoff_factor,
        growth_interval,
        where=jnp.where,
        multiply=_multiply,
    )
