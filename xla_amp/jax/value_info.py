"""Values of one program with what is known of them: weights, constants and their low-precision copies.

A *fact* is what is known of an array besides its type, from how the program made it: "it is a weight", "it is a
constant of at most 3.0", "it was widened from bfloat16".  `Facts` has a field for each.  They stand beside the array in
the interpreter's environment, so nothing outlives the evaluation of a jaxpr.

A *weight* comes from outside the program, so its gradient is wanted in float32.  A *constant* adopts any dtype whose
range holds it.  A *bias* is a weight that an operation spreads along the other axes of a contraction's result.  A low
copy of a value is made once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.common.types import Cast
from xla_amp.jax import compat
from xla_amp.jax.contraction_primitives import low_copy
from xla_amp.jax.decisions import F32, dtype_of, is_castable
from xla_amp.jax.primitives import info
from xla_amp.policy.cast_dtypes import cast_dtypes


class Facts(NamedTuple):
    """What is known of a value that holds for any array in its place; a key of a cache may hold it."""

    weight: bool = False
    """Whether it, or the value that it was moved from, comes from outside."""
    broadcast: bool = False
    """Whether it was broadcast from fewer elements."""
    constant: float | None = None
    """The largest magnitude of a constant."""
    selects: bool = False
    """Whether its elements are 0 and 1, made from booleans: a product with it selects or counts."""
    widened: str = ""
    """The low dtype from which the program widened it; empty if it did not."""
    features: tuple[frozenset[int], ...] = ()
    """For each weight in the contraction that computed it, the axes that the weight gave it."""


NOTHING = Facts()


class Move(NamedTuple):
    """Data movement that made a value."""

    primitive: Any
    params: dict[str, Any]
    source: Value
    rest: tuple[Any, ...]
    """Further operands."""


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """An array of the program, and what is known of it."""

    array: Any
    facts: Facts = NOTHING
    move: Move | None = None
    low: Any = None
    """Its low copy, once it is made."""
    wide: Any = None
    """Its float32 copy, once it is made, if it is low."""

    def is_weight(self) -> bool:
        """Whether it comes from outside and is float32: its gradient is wanted in float32."""
        return self.facts.weight and dtype_of(self.array) == F32

    def has_low_copy(self) -> bool:
        """Whether a low copy exists of it, or of the value that it was moved from."""
        return self.low is not None or (self.move is not None and self.move.source.has_low_copy())

    def was_gathered_low(self) -> bool:
        """Whether its low copy was moved between devices in its place."""
        return self.low is not None and self.move is not None and info(self.move.primitive.name).between_devices


def outside(array: Any) -> Value:
    """A value that comes from outside the program."""
    return Value(array, Facts(weight=is_castable(dtype_of(array))))


def inside(array: Any) -> Value:
    """A value of the program: a constant, if it is a number."""
    return Value(array, Facts(constant=magnitude(array)) if isinstance(array, np.ndarray | np.generic) else NOTHING)


def arguments(arrays: Sequence[Any], weights: Sequence[bool] | None = None) -> list[Value]:
    """Arguments of a program, of which `weights` come from outside; None for all."""
    flags = [True] * len(arrays) if weights is None else weights
    return [outside(array) if weight else inside(array) for array, weight in zip(arrays, flags, strict=True)]


def arrays_of(values: Iterable[Value]) -> list[Any]:
    """The arrays of `values`."""
    return [value.array for value in values]


def cast(array: Any, dtype: Any) -> Any:
    """`array` in `dtype`, if autocast changes its dtype."""
    given = dtype_of(array)
    if given is None or given == dtype or not is_castable(given):
        return array
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array).astype(dtype)
    return compat.convert(array, dtype)


class CastCache:
    """Casts of the values of one region."""

    def __init__(self, low: Any) -> None:
        self._low = low

    def low_copy(self, value: Value) -> Any:
        """The low copy of `value`, made once; no gradient passes through that of a weight."""
        if value.low is None:
            move = value.move
            if move is not None and (info(move.primitive.name).between_devices or move.source.has_low_copy()):
                with compat.mesh_of(value.array):
                    value.low = compat.bind(move.primitive, [self.low_copy(move.source), *move.rest], move.params)[0]
            else:
                value.low = (low_copy if value.facts.weight else cast)(value.array, self._low)
        return value.low

    def moved(self, primitive: Any, params: dict[str, Any], source: Value, rest: Sequence[Any], result: Any) -> Value:
        """`result`, which holds the elements of `source`: facts about one apply to the other."""
        if result is source.array:  # JAX returns the operand of a no-op
            return source
        known = source.facts
        facts = Facts(constant=known.constant, selects=known.selects, widened=known.widened)
        row = info(primitive.name)
        if known.features and row.axis_order:
            order = params[row.axis_order]
            features = (frozenset(new for new, old in enumerate(order) if old in axes) for axes in known.features)
            facts = facts._replace(features=tuple(features))
        if dtype_of(result) != dtype_of(source.array) or not known.weight:
            return Value(result, facts)
        grown = compat.size(result) > compat.size(source.array) and not row.between_devices
        facts = facts._replace(weight=True, broadcast=known.broadcast or grown)
        return Value(result, facts, Move(primitive, params, source, tuple(rest)))

    def cast(self, value: Value, dtype: Any) -> Any:
        """The array of `value` in `dtype`, if autocast changes its dtype; a float32 copy is made once."""
        if dtype != F32 or dtype_of(value.array) == F32 or compat.is_concrete(value.array):
            return cast(value.array, dtype)
        if value.wide is None:
            value.wide = cast(value.array, dtype)
        return value.wide

    def adopts_dtype(self, value: Value, weak: bool, *, exact: bool = False, rounds: bool = True) -> bool:
        """Whether `value` adopts the other operands' dtype.

        Numbers in range do, those that it rounds only if `rounds`; and a broadcast weight unless `exact`.
        """
        if weak and rounds:
            return True
        if value.facts.constant is not None:
            return self._in_range(value.facts.constant) and (rounds or self._holds(value.facts.constant))
        return value.facts.weight and value.facts.broadcast and not exact

    def stand_in(self, constant: float) -> float:
        """A number for `constant` wherever its value is not known: it is rounded by the low dtype if `constant` is."""
        return 1.0 if self._holds(constant) else 1 / 3

    def _holds(self, constant: float) -> bool:
        return float(np.asarray(constant, np.float32).astype(self._low)) == constant

    def _in_range(self, constant: float) -> bool:
        # Subnormal numbers count as out of range: several devices flush them to zero.
        limits = jnp.finfo(self._low)
        return constant == 0 or float(limits.tiny) <= constant <= float(limits.max)

    def cast_operands(
        self, cast: Cast, values: Sequence[Value], weak: Sequence[bool], *, exact: bool = False, rounds: bool = True
    ) -> list[Any]:
        """The arrays of `values` in the dtypes that a primitive, which takes one, computes in under a cast.

        Args:
            weak: which of them are weakly typed.
            exact: whether a rule of the user gives the cast: then only numbers adopt the dtype of other operands,
                otherwise also a bias, as torch's ``linear`` casts it with its product.
            rounds: whether a number may be rounded to the dtype that it adopts.
        """
        given = tuple(dtype_of(v.array) if is_castable(dtype_of(v.array)) else None for v in values)
        if cast in ("keep", "promote") and len({dtype for dtype in given if dtype is not None}) < 2:
            return arrays_of(values)
        product = None if exact else next((value for value in values if value.facts.features), None)
        biases = [product is not None and _is_bias(value, product) for value in values]
        carried = tuple(
            None if is_bias or self.adopts_dtype(value, is_weak, exact=exact, rounds=rounds) else dtype
            for dtype, value, is_weak, is_bias in zip(given, values, weak, biases, strict=True)
        )
        of = given if all(dtype is None for dtype in carried) else carried
        used = cast_dtypes(cast, of, self._low, F32, mixed=False, asks_result=False).operands
        target = next((dtype for dtype in used if dtype is not None), None)
        promoted = list(values)
        for index, is_bias in enumerate(biases):
            if is_bias and target == self._low:
                # Spread before the cast, so that the gradient of the bias adds up in float32.
                shape: tuple[int, ...] = np.shape(product.array)  # type: ignore[union-attr]
                spread = lax.broadcast_in_dim(values[index].array, shape, tuple(range(len(shape))))
                promoted[index] = Value(spread)
        return arrays_of(promoted) if target is None else [self.cast(value, target) for value in promoted]


def _is_bias(value: Value, product: Value) -> bool:
    """Whether `value` is a weight that is spread along all axes of `product` but those of one weight in it."""
    own, shape = np.shape(value.array), np.shape(product.array)
    if not value.facts.weight or len(own) != len(shape):
        return False
    spread = compat.size(value.array) < compat.size(product.array) or (
        value.move is not None and np.ndim(value.move.source.array) < len(own)
    )
    fits = all(size in (1, full) for size, full in zip(own, shape, strict=True))
    axes = {axis for axis, size in enumerate(own) if size not in (0, 1)}
    return bool(spread and fits and any(axes <= features for features in product.facts.features))


def magnitude(value: Any) -> float | None:
    """The magnitude of a scalar constant of the program; None for other values.  Infinity counts as in range."""
    if not isinstance(value, np.ndarray | np.generic) or np.ndim(value) or not is_castable(value.dtype):
        return None
    size = abs(float(value))
    return 0.0 if np.isinf(size) or np.isnan(size) else size
