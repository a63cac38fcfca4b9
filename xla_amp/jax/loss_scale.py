"""Dynamic loss scale as a pytree (`LossScale`), and `value_and_grad` of a scaled loss.

A loss is multiplied by the scale before the backward pass, so that small float16 gradients do not become zero
(Micikevicius et al. 2018, section 3.2).  All state and settings, bounds and factors too, are leaves of the pytree, so
`jax.jit`, `jax.lax.scan`, checkpoints and pickles keep them.  The arithmetic is that of `common.loss_scaling.update`,
as in the PyTorch scaler.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.common import arguments
from xla_amp.common import loss_scaling as formula
from xla_amp.errors import PolicyError
from xla_amp.jax import compat, modules

if TYPE_CHECKING:
    from flax import nnx

_Tree = TypeVar("_Tree")
_T = TypeVar("_T")
_P = ParamSpec("_P")

SMALLEST: Final = 2.0**-126
LARGEST: Final = 2.0**126
"""Bounds of the scale: its inverse must be a normal float32, since XLA flushes subnormal numbers to zero."""


class LossScale(NamedTuple):
    """A loss scale, its settings and counters; construct it with `dynamic` or `static`.

    Every field is a 0-d array (float32 or int32) and a leaf: checkpoints restore the settings, and changing a setting
    does not recompile.  A named tuple is what JAX, orbax, pickle and flax's msgpack know how to store.

    Example:
        >>> loss_scale = LossScale.dynamic(2.0**15)
        >>> float(loss_scale.update(False).value), float(loss_scale.update(True).value)
        (16384.0, 32768.0)
    """

    value: jax.Array
    """The factor of the loss, float32."""
    growth_tracker: jax.Array
    """Consecutive finite steps since the scale last changed, int32."""
    growth_factor: jax.Array
    backoff_factor: jax.Array
    growth_interval: jax.Array
    min_scale: jax.Array
    max_scale: jax.Array
    skipped: jax.Array
    """Number of all steps with nonfinite gradients, int32."""
    skipped_in_a_row: jax.Array
    """Number of consecutive nonfinite steps up to now, int32; if it keeps growing, the model diverged."""

    def __repr__(self) -> str:
        """The scale and its counters; traced values are shown as JAX shows them."""
        shown = (self.value, self.growth_tracker, self.skipped)
        value, tracker, skipped = (each.item() if compat.is_concrete(each) else each for each in shown)
        return f"LossScale(value={value}, growth_tracker={tracker}, skipped={skipped})"

    @classmethod
    def dynamic(
        cls,
        init_scale: float = formula.INITIAL,
        *,
        growth_factor: float = formula.GROWTH_FACTOR,
        backoff_factor: float = formula.BACKOFF_FACTOR,
        growth_interval: int = formula.GROWTH_INTERVAL,
        min_scale: float = SMALLEST,
        max_scale: float = LARGEST,
    ) -> LossScale:
        """A scale that falls after an overflow and rises after consecutive finite steps; defaults are torch's.

        Args:
            init_scale: first scale.
            growth_factor: multiplies the scale after `growth_interval` finite steps; at least 1.
            backoff_factor: multiplies it after an overflow; above 0, at most 1.
            growth_interval: finite steps between two growths; at least 1.
            min_scale: lower bound, which the scale never leaves; at least 2**-126.
            max_scale: upper bound; at most 2**126.

        Raises:
            PolicyError: a setting outside of these ranges.
        """
        _require("growth_factor", growth_factor, 1, LARGEST)
        _require("backoff_factor", backoff_factor, SMALLEST, 1)
        _require("growth_interval", growth_interval, 1, 2**31 - 1, numbers.Integral)
        _require("min_scale", min_scale, SMALLEST, LARGEST)
        _require("max_scale", max_scale, min_scale, LARGEST)
        _require("init_scale", init_scale, min_scale, max_scale)
        return cls(
            value=jnp.float32(init_scale),
            growth_tracker=jnp.int32(0),
            growth_factor=jnp.float32(growth_factor),
            backoff_factor=jnp.float32(backoff_factor),
            growth_interval=jnp.int32(growth_interval),
            min_scale=jnp.float32(min_scale),
            max_scale=jnp.float32(max_scale),
            skipped=jnp.int32(0),
            skipped_in_a_row=jnp.int32(0),
        )

    @classmethod
    def static(cls, scale: float = 1.0) -> LossScale:
        """A constant scale; 1 switches scaling off and still counts nonfinite steps.

        Raises:
            PolicyError: `scale` is not between 2**-126 and 2**126.
        """
        return cls.dynamic(scale, growth_factor=1.0, backoff_factor=1.0)

    def scale(self, tree: _Tree) -> _Tree:
        """`tree`, e.g. a loss, times the scale; half dtypes become float32, which can hold a scale of 65536.

        Leaves that are not floating point stay as they are.
        """
        scaled: _Tree = jax.tree.map(lambda x: wide(x) * self._value_like(x) if is_inexact(x) else x, tree)
        return scaled

    def unscale(self, tree: _Tree, *, keep_dtype: bool = False) -> _Tree:
        """`tree`, e.g. gradients, divided by the scale, computed in float32 (float64 leaves in float64).

        Args:
            tree: any pytree; leaves that are not floating point (also ``float0`` and other objects) stay as they are.
            keep_dtype: return half leaves in their dtype, where small gradients underflow again; otherwise float32.
        """

        def divide(x: Any) -> Any:
            if not is_inexact(x):
                return x
            divided = wide(x) / self._value_like(x)
            return divided.astype(jnp.result_type(x)) if keep_dtype else divided

        unscaled: _Tree = jax.tree.map(divide, tree)
        return unscaled

    def _value_like(self, x: Any) -> jax.Array:
        return self.value.astype(jnp.finfo(wide(x).dtype).dtype)

    def update(self, finite: Any) -> LossScale:
        """The scale for the next step.

        Args:
            finite: bool, or 0-d bool array: whether all gradients of this step were finite.
        """
        finite = jnp.asarray(finite, jnp.bool_)
        value, tracker = formula.update(
            self.value,
            self.growth_tracker,
            ~finite,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
            where=jnp.where,
            multiply=jnp.multiply,  # a product of two float32 is exact in float64: this rounding is torch's
        )
        skipped = (~finite).astype(jnp.int32)
        return self._replace(
            value=jnp.clip(value, self.min_scale, self.max_scale),
            growth_tracker=tracker,
            skipped=self.skipped + skipped,
            skipped_in_a_row=(self.skipped_in_a_row + skipped) * skipped,
        )

    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]:
        """The fields by name as NumPy arrays, for formats that store no tuples."""
        return {name: np.asarray(value) for name, value in self._asdict().items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> LossScale:
        """The inverse of `state_dict`.

        Raises:
            PolicyError: a field is missing or unknown.
        """
        template = cls.static().state_dict()
        if set(state) != set(template):
            raise PolicyError(
                f"LossScale.from_state_dict(): expected the fields {', '.join(template)}, "
                f"got {', '.join(map(str, state)) or 'none'}"
            )
        return cls(**{name: jnp.asarray(state[name], like.dtype) for name, like in template.items()})


class ScaledGradients(NamedTuple, Generic[_T]):
    """Result of a function that `value_and_grad` returns."""

    value: _T
    """Result of the function, unscaled: its loss, or ``(loss, aux)`` with `has_aux`."""
    grads: Any
    """Unscaled gradients; those of half arguments are float32 unless `keep_dtype` is set."""
    finite: jax.Array
    """Whether all gradients are finite, 0-d bool."""
    loss_scale: LossScale
    """For the next step."""


def value_and_grad(
    fn: Callable[_P, _T],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    *,
    axis_name: Any = None,
    keep_dtype: bool = False,
) -> Callable[Concatenate[LossScale, _P], ScaledGradients[_T]]:
    """`jax.value_and_grad` with a scaled loss.

    The gradients are divided in float32 by the scale that the loss was multiplied by; then the scale is updated.  The
    floating-point leaves of the chosen arguments are differentiated; other leaves (integers, keys, functions in an
    Equinox module) have the gradient None.  Of a module of `flax.nnx` the parameters are differentiated, as by
    ``nnx.value_and_grad``; what `fn` changes of modules among its arguments comes back.

    Args:
        fn: function of pytrees that returns a scalar loss, or ``(loss, aux)``.  A float32 loss is best: the backward
            pass of a float16 one begins with the scale in float16, where more than 65504 is an overflow.
        argnums: which positional arguments to differentiate, counted without the loss scale.  With
            ``nnx.DiffState(0, filter)`` it is other variables of a module than its ``nnx.Param``.
        has_aux: whether `fn` returns ``(loss, aux)``.
        axis_name: axes of `jax.pmap` or `jax.shard_map` over which the finite flag is reduced: one device's
            overflow counts on all.  Gradients are not averaged.
        keep_dtype: return gradients in the dtype of the argument instead of at least float32.

    Returns:
        A function ``(loss_scale, *args, **kwargs)`` that returns `ScaledGradients`.

    Raises:
        TypeError: `argnums` are no positions; raised by the function if its first argument is not a `LossScale`, or
            `fn` does not return a real scalar, with `has_aux` in a pair.

    Example:
        >>> import jax.numpy as jnp
        >>> step = value_and_grad(lambda w, x: jnp.sum(w * x))
        >>> out = step(LossScale.dynamic(2.0**15), jnp.float16(3), jnp.float16(1e-3))
        >>> out.value.dtype, out.grads.dtype, bool(out.finite)
        (dtype('float16'), dtype('float32'), True)
    """
    arguments.require_function("value_and_grad(fn)", fn, "a function that returns a loss")
    one = isinstance(argnums, int) or modules.is_diff_state(argnums)
    given: Any = argnums
    chosen: tuple[Any, ...] = (given,) if one else tuple(given)
    if not all(isinstance(number, int) or modules.is_diff_state(number) for number in chosen):
        raise TypeError(
            f"value_and_grad(argnums={argnums!r}): expected the position of an argument of fn, or several, such as 0 "
            "or (0, 1); fn's arguments are not chosen by name"
        )

    def scaled_value_and_grad(loss_scale: LossScale, *args: _P.args, **kwargs: _P.kwargs) -> ScaledGradients[_T]:
        if not isinstance(loss_scale, LossScale):
            raise TypeError(
                "value_and_grad(fn) takes the loss scale first: expected xla_amp.jax.LossScale, "
                f"got {type(loss_scale).__name__}; write step(loss_scale, params, ...)"
            )
        filters = {getattr(number, "argnum", number): getattr(number, "filter", None) for number in chosen}
        if any(not -len(args) <= number < len(args) for number in filters):
            raise TypeError(f"value_and_grad(argnums={argnums}): fn was called with {len(args)} positional arguments")
        positions = {number % len(args): variables for number, variables in filters.items()}
        if len(positions) < len(chosen):
            raise TypeError(f"value_and_grad(argnums={argnums}): expected each argument once")
        with modules.lifted_call(fn, args, kwargs) as lifted:
            return differentiated(loss_scale, lifted, positions)

    def differentiated(loss_scale: LossScale, lifted: modules.Lifted, positions: dict[int, Any]) -> ScaledGradients[_T]:
        parts, filled = modules.differentiated(lifted, positions)
        leaves, tree = jax.tree.flatten(parts)

        def scaled_loss(floats: list[Any]) -> tuple[Any, Any]:
            new = [old if new is None else new for new, old in zip(floats, leaves, strict=True)]
            lifted_result = lifted.function(*filled(jax.tree.unflatten(tree, new)), **lifted.kwargs)
            result = lifted.result(lifted_result)
            if has_aux and not (isinstance(result, tuple) and len(result) == 2):
                raise TypeError(
                    "value_and_grad(fn, has_aux=True): expected fn to return (loss, aux), got "
                    f"{_shown(result)}; leave has_aux out where fn returns its loss alone"
                )
            loss: Any = result[0] if has_aux else result  # a pair where has_aux is set
            if not is_inexact(loss) or jnp.shape(loss) != () or jnp.iscomplexobj(loss):
                raise TypeError(f"value_and_grad(fn): expected fn to return a real scalar loss, got {_shown(loss)}")
            return loss_scale.scale(loss), lifted_result

        floats = [jnp.asarray(leaf) if is_inexact(leaf) else None for leaf in leaves]
        scaled, value = jax.grad(scaled_loss, has_aux=True)(floats)
        unscaled = loss_scale.unscale(scaled, keep_dtype=keep_dtype)
        finite = all_finite(unscaled, axis_name=axis_name)
        gradients = tuple(jax.tree.unflatten(tree, unscaled))
        return ScaledGradients(
            lifted.finish(value), gradients[0] if one else gradients, finite, loss_scale.update(finite)
        )

    return scaled_value_and_grad  # type: ignore[return-value]  # also by keyword


def all_finite(tree: Any, *, axis_name: Any = None) -> jax.Array:
    """Whether no floating-point leaf of `tree` has an inf or a nan, 0-d bool.

    Args:
        axis_name: axes of `jax.pmap` or `jax.shard_map` over which the flag is reduced.
    """
    flags = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if is_inexact(x)]
    return on_all_devices(jnp.all(jnp.stack(flags)) if flags else jnp.asarray(True), axis_name)


def reduce_gradients(gradients: _Tree, axis_name: Any, dtype: Any = None) -> _Tree:
    """The mean of every device's gradients, each in its own dtype; added in float32.

    For gradients that differ between devices: under `jax.pmap`, `jax.vmap`, or `jax.shard_map` with
    ``check_vma=False``.  Under `jax.jit` with shardings XLA adds them, in float32 under `xla_amp.jax.autocast`.

    Args:
        gradients: a pytree; leaves without floating point are added in their own dtype.
        axis_name: axes to reduce over.
        dtype: the dtype in which floating-point leaves are sent and added; None is float32, and float64 for those of
            float64.  ``jnp.bfloat16`` halves the traffic; a sum that overflows in it is inf.

    Raises:
        TypeError: `dtype` is not a floating dtype of 16 bits or more, or `axis_name` is no name.

    Example:
        >>> halves = jnp.full((2, 1), 40000.0, jnp.float16)  # their float16 sum is inf
        >>> jax.vmap(lambda g: reduce_gradients(g, "d"), axis_name="d")(halves).tolist()
        [[40000.0], [40000.0]]
    """
    if dtype is not None and not (jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1):
        raise TypeError(f"reduce_gradients(dtype={dtype!r}): {arguments.SUM_DTYPE.format('jnp')}")
    if axis_name is None or isinstance(axis_name, numbers.Number):
        raise TypeError(
            f"reduce_gradients(axis_name={axis_name!r}): expected the name of an axis of jax.pmap or jax.shard_map, "
            'such as "data", or a tuple of names'
        )
    count = jax.lax.psum(1, axis_name)

    def mean(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.lax.psum(leaf, axis_name) / count
        wanted = jnp.promote_types(leaf.dtype, jnp.float32) if dtype is None else jnp.dtype(dtype)
        total = jax.lax.psum(leaf.astype(wanted), axis_name)
        return (total.astype(jnp.promote_types(total.dtype, jnp.float32)) / count).astype(leaf.dtype)

    reduced: _Tree = jax.tree.map(mean, gradients)
    return reduced


def on_all_devices(flag: jax.Array, axis_name: Any) -> jax.Array:
    """Whether `flag` is true on all devices of these axes; `flag` itself if `axis_name` is None."""
    if axis_name is None:
        return flag
    reduced: jax.Array = jax.lax.pmin(flag.astype(jnp.int32), axis_name)
    return reduced != 0


def select(finite: Any, new: _Tree, old: _Tree) -> _Tree:
    """`new` if `finite`, otherwise `old`, leaf by leaf and bitwise; leaves that are not arrays are those of `new`.

    It is a select, not a conditional: on GPUs a conditional makes the host wait.

    Args:
        finite: 0-d bool.
        new: a pytree.
        old: a pytree of the same structure; its leaves take the dtypes of the new ones.
    """
    if jnp.shape(finite) != () or jnp.result_type(finite) != jnp.bool_:
        raise TypeError(f"select(finite={finite!r}): expected a bool, or an array of shape () and dtype bool")

    def chosen(after: Any, before: Any) -> Any:
        if not _is_array(after):
            return after
        if before.dtype != after.dtype:
            before = jnp.asarray(before).astype(after.dtype)
        return jax.lax.select(jnp.asarray(finite), jnp.asarray(after), jnp.asarray(before))

    selected: _Tree = jax.tree.map(chosen, new, old)
    return selected


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf (array, NumPy scalar or Python number) is floating point or complex."""
    return (_is_array(leaf) or isinstance(leaf, float | complex)) and jnp.issubdtype(
        getattr(leaf, "dtype", type(leaf)), jnp.inexact
    )


def _shown(value: Any) -> str:
    return str(jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}" if _is_array(x) else x, value))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def wide(x: Any) -> jax.Array:
    """`x` in its dtype if that has at least 32 bits, otherwise in float32."""
    array: jax.Array = jnp.asarray(x)
    return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array


def _require(name: str, value: Any, low: float, high: float, kind: type = numbers.Real) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:  # type: ignore[operator]
        expected = "a whole number" if kind is numbers.Integral else "a number"
        raise PolicyError(
            f"LossScale({name}={value!r}): expected {expected} between {low:g} and {high:g}, got {type(value).__name__}"
        )
