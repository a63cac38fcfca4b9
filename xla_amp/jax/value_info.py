"""Values of one program with what is known of them: weights, constants and their low-precision copies.

A *fact* is what is known of an array besides its type, from how the program made it: "it is a weight", "it is a
constant of at most 3.0", "it was widened from bfloat16".  `Facts` has a field for each.  They stand beside the array in
the interpreter's environment, so nothing outlives the evaluation of a jaxpr.

A *weight* comes from outside the program, so its gradient is wanted in float32.  A *constant* adopts any dtype whose
range holds it.  A *bias* is a weight that is added to a product and varies along its feature axes only.  A low copy of
a value is made once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.analysis import beside_low
from xla_amp.common.types import Cast
from xla_amp.jax import compat
from xla_amp.jax.decisions import F32, castable_dtype, dtype_of, is_castable
from xla_amp.jax.low_primitives import low_copy
from xla_amp.jax.primitives import NO_ROW, PrimitiveInfo, info
from xla_amp.policy.cast_dtypes import cast_dtypes


class Facts(NamedTuple):
    """What is known of a value that holds for any array in its place; a key of a cache may hold it."""

    weight: bool = False
    """Whether it, or the value that it was moved from, comes from outside."""
    constant: float | None = None
    """The magnitude of a number, or of all elements of an array that was broadcast from one."""
    selects: bool = False
    """Whether its elements are 0 and 1, made from booleans: a product with it selects or counts."""
    widened: str = ""
    """The low dtype from which the program widened it; empty if it did not."""
    axes: beside_low.Axes = ()
    """Where it varies as a weight, or as the product of one (`xla_amp.analysis.beside_low`)."""
    biased: bool = False
    """Whether it is the low sum of a product and a bias: a product and a sum read its gradient."""


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
        return self.facts.weight and self.array.dtype == F32

    def is_number(self) -> bool:
        """Whether it is a number of the program, not an array."""
        return self.facts.constant is not None and not np.ndim(self.array)

    def has_low_copy(self) -> bool:
        """Whether a low copy exists of it, or of the value that it was moved from."""
        return self.low is not None or (self.move is not None and self.move.source.has_low_copy())

    def was_gathered_low(self) -> bool:
        """Whether its low copy was moved between devices in its place."""
        return self.low is not None and self.move is not None and info(self.move.primitive.name).between_devices


def outside(array: Any) -> Value:
    """A value that comes from outside the program."""
    if not is_castable(dtype_of(array)):
        return Value(array)
    return Value(array, Facts(weight=True, axes=(frozenset(range(np.ndim(array))),)))


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
        self._numbers = beside_low.LOW_NUMBERS[low.name]

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
        known, row = source.facts, info(primitive.name)
        order = params[row.axis_order] if row.axis_order else None
        places = params[row.axis_places] if row.axis_places else None
        axes = beside_low.axes_after(
            known.axes, np.shape(source.array), np.shape(result), order=order, places=places, weight=known.weight
        )
        facts = known._replace(weight=False, axes=axes)
        if not known.weight or result.dtype != source.array.dtype:
            return Value(result, facts)
        return Value(result, facts._replace(weight=True), Move(primitive, params, source, tuple(rest)))

    def cast(self, value: Value, dtype: Any) -> Any:
        """The array of `value` in `dtype`, if autocast changes its dtype; a float32 copy is made once."""
        if dtype != F32 or dtype_of(value.array) == F32 or compat.is_concrete(value.array):
            return cast(value.array, dtype)
        if value.wide is None:
            value.wide = cast(value.array, dtype)
        return value.wide

    def adopts_dtype(self, value: Value, weak: bool, row: PrimitiveInfo = NO_ROW) -> bool:
        """Whether `value` adopts the other operands' dtype in a primitive.

        Weakly typed values do, as in JAX, and numbers that leave room in the low dtype's range.  An array is no number,
        whatever it was broadcast from, except to a primitive that returns elements of its operands.  That must not move
        a bound to 1, where a logarithm follows it, and what compares must not round at all.
        """
        constant = value.facts.constant
        if constant is None:
            return weak and not row.picks and not row.exact
        if not self._numbers.in_range(constant):
            return False
        if row.exact:
            return self._numbers.holds(constant)
        if row.picks:
            return self._numbers.stays_apart(constant)
        return self._numbers.leaves_room(constant) and (weak or not np.ndim(value.array))

    def scales(self, value: Value) -> bool:
        """Whether a low value times the number `value` is what it is in float32."""
        constant = value.facts.constant
        return constant is not None and self._numbers.scales(constant)

    def stand_in(self, constant: float | None) -> float | None:
        """A number that adopts a low dtype where `constant` does; None where that never does, or is no number."""
        numbers = self._numbers
        if constant is None or not numbers.in_range(constant):
            return None
        if not numbers.holds(constant) and not numbers.stays_apart(constant):
            return 1 - 1e-6
        if numbers.scales(constant):
            return 1.0
        unit = 1.0 if numbers.leaves_room(constant) else 4 * numbers.smallest
        return 1.5 * unit if numbers.holds(constant) else unit / 3

    def cast_operands(
        self,
        cast: Cast,
        values: Sequence[Value],
        weak: Sequence[bool],
        row: PrimitiveInfo = NO_ROW,
        *,
        from_user: bool = False,
    ) -> list[Any]:
        """The arrays of `values` in the dtypes that a primitive, which takes one, computes in under a cast.

        Args:
            weak: which of them are weakly typed.
            row: of the primitive.
            from_user: whether a rule of the user gives the cast: then a bias is an array like others.
        """
        given = tuple(map(castable_dtype, arrays_of(values)))
        if cast in ("keep", "promote") and len({*given} - {None}) < 2:
            return arrays_of(values)
        pairs = zip(values, reversed(values), strict=True)
        biases = [row.adds and not from_user and self._is_bias(value, other) for value, other in pairs]
        carried = tuple(
            None if is_bias or self.adopts_dtype(value, is_weak, row) else dtype
            for dtype, value, is_weak, is_bias in zip(given, values, weak, biases, strict=True)
        )
        of = carried if any(carried) else given
        used = cast_dtypes(cast, of, self._low, F32, mixed=False, asks_result=False).operands
        target = next(filter(None, used), None)
        promoted = list(values)
        if target == self._low and any(biases):
            # Spread before the cast, so that the gradient of the bias adds up in float32.
            index = biases.index(True)
            shape = np.shape(values[1 - index].array)
            promoted[index] = Value(lax.broadcast_in_dim(values[index].array, shape, tuple(range(len(shape)))))
        return arrays_of(promoted) if target is None else [self.cast(value, target) for value in promoted]

    def _is_bias(self, value: Value, product: Value) -> bool:
        """Whether a weight is added as a bias; one with known numbers out of the low dtype's range is a mask."""
        facts, shape = value.facts, np.shape(value.array)
        if not facts.weight or product.facts.weight:
            return False
        if not beside_low.is_bias(facts.axes, shape, product.facts.axes, np.shape(product.array)):
            return False
        if jnp.finfo(self._low).maxexp == jnp.finfo(F32).maxexp:
            return True
        while value.move is not None:
            value = value.move.source
        array = value.array
        if not compat.is_concrete(array) or not getattr(array, "is_fully_addressable", True):
            return True
        known = np.abs(np.asarray(array))
        return not bool(np.any((known > float(jnp.finfo(self._low).max)) & np.isfinite(known)))


def sum_of(values: Sequence[Value], result: Any) -> Value:
    """The result of an addition, which is a product to the next bias if a product was added to."""
    products = [v.facts.axes for v in values if v.facts.axes and not v.facts.weight]
    if not products or dtype_of(result) == F32:
        return inside(result)
    return Value(result, Facts(axes=beside_low.axes_of_sum(products), biased=any(v.facts.weight for v in values)))


def magnitude(value: Any) -> float | None:
    """The magnitude of a scalar constant of the program; None for other values.  Infinity counts as in range."""
    if not isinstance(value, np.ndarray | np.generic) or np.ndim(value) or not is_castable(value.dtype):
        return None
    size = abs(float(value))
    return 0.0 if np.isinf(size) or np.isnan(size) else size
