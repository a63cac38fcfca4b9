"""Facts about the values of one program or region: weights, constants and their low-precision copies.

A *fact* is what is known of an array besides its type, from how the program made it: "it is a weight", "it is a
constant of at most 3.0", "it was widened from bfloat16".  `ValueInfo` has a field for each.

A *weight* comes from outside the program, so its gradient is wanted in float32.  A *constant* adopts any dtype whose
range holds it.  A *bias* is a weight that an operation spreads along the other axes of a contraction's result.  A low
copy of a value is made once.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.jax import compat
from xla_amp.jax.contraction_primitives import low_copy
from xla_amp.jax.decisions import F32, dtype_of, is_castable
from xla_amp.jax.primitives import AXIS_ORDER, CAST_BEFORE
from xla_amp.policy.cast_dtypes import cast_dtypes
from xla_amp.types import Cast


@dataclasses.dataclass(slots=True)
class ValueInfo:
    """Facts about one value."""

    value: Any
    """The value, so that its ``id`` is not reused; a weak reference to a concrete array, to release its memory."""
    weight: bool = False
    broadcast: bool = False
    """Whether it was broadcast from fewer elements."""
    constant: float | None = None
    """The largest magnitude of a constant."""
    low: Any = None
    """Its low copy."""
    wide: Any = None
    """Its float32 copy, if it is low."""
    moved: tuple[Any, dict[str, Any], Any, Sequence[Any]] | None = None
    """Data movement that made it: primitive, parameters, source array and further operands."""
    selects: bool = False
    """Whether its elements are 0 and 1, made from booleans: a product with it selects or counts."""
    widened: str = ""
    """The low dtype from which the program widened it; empty if it did not."""
    features: tuple[frozenset[int], ...] = ()
    """For each weight in the contraction that computed it, the axes that the weight gave it."""


Facts: TypeAlias = tuple[bool, bool, float | None, bool, str, tuple[frozenset[int], ...]]
"""The fields of `ValueInfo` that `ValueTable.facts` gives."""


class ValueTable:
    """Facts about the values of one program, by identity.

    Args:
        low: the low dtype.
    """

    def __init__(self, low: Any) -> None:
        self._low = low
        self._infos: dict[int, ValueInfo] = {}

    def get(self, value: Any) -> ValueInfo | None:
        """Facts about `value`, or None."""
        return self._infos.get(id(value))

    def _ensure(self, value: Any) -> ValueInfo:
        found = self._infos.get(id(value))
        if found is None:
            found = self._infos[id(value)] = ValueInfo(self._reference(value))
        return found

    def _reference(self, value: Any) -> Any:
        if not compat.is_array(value) or not compat.is_concrete(value):
            return value
        key, infos = id(value), self._infos
        return weakref.ref(value, functools.partial(infos.pop, key))

    def mark_computed(self, value: Any) -> None:
        """`value` was computed inside."""
        if is_castable(dtype_of(value)):
            self._ensure(value)

    def mark_adopting(self, value: Any) -> None:
        """`value` stands for a constant in range."""
        self._ensure(value).constant = 1.0

    def mark_weight(self, value: Any) -> None:
        """`value` comes from outside."""
        if is_castable(dtype_of(value)):
            self._ensure(value).weight = True

    def is_outside(self, value: Any) -> bool:
        """Whether `value`, or the value that it was moved from, comes from outside."""
        found = self.get(value)
        return found is not None and found.weight

    def is_weight(self, value: Any) -> bool:
        """Whether `value` comes from outside and is float32: its gradient is wanted in float32."""
        return dtype_of(value) == F32 and self.is_outside(value)

    def mark_selecting(self, value: Any) -> None:
        """The elements of `value` were made from booleans."""
        self._ensure(value).selects = True

    def is_selecting(self, value: Any) -> bool:
        """Whether the elements of `value` were made from booleans."""
        found = self.get(value)
        return found is not None and found.selects

    def mark_widened(self, value: Any, dtype: Any) -> None:
        """The program itself computed `value` in the low dtype `dtype` and made it float32."""
        self._ensure(value).widened = str(dtype)

    def widened(self, value: Any) -> str:
        """The low dtype from which the program widened `value`; empty if it did not."""
        found = self.get(value)
        return found.widened if found is not None else ""

    def mark_features(self, value: Any, features: tuple[frozenset[int], ...]) -> None:
        """`value` is a contraction's result; each weight in it gave it these axes."""
        self._ensure(value).features = features

    def facts(self, value: Any) -> Facts | None:
        """The facts about `value` that hold for any array in its place; None if nothing is known.

        They are hashable, so a key of a cache may hold them.  The low copy, the float32 copy and the array that it was
        moved from are left out: these are arrays themselves, of one program.
        """
        known = self._infos.get(id(value))
        if known is None:
            return None
        return known.weight, known.broadcast, known.constant, known.selects, known.widened, known.features

    def copy_facts(self, value: Any, facts: Facts | None) -> None:
        """`value` takes the place of another array, of which `facts` gave these."""
        if facts is not None:
            new = self._ensure(value)
            new.weight, new.broadcast, new.constant, new.selects, new.widened, new.features = facts

    def set_low_copy(self, value: Any, low: Any) -> None:
        """`low` is the low copy of `value`."""
        self._ensure(value).low = low

    def low_copy(self, value: Any) -> Any:
        """The low copy of `value`, made once; no gradient passes through that of a weight."""
        found = self._infos.get(id(value))
        if found is None:
            low = self.cast(value, self._low)
            if not compat.is_concrete(value):
                self._ensure(value).low = low
            return low
        if found.low is None:
            if found.moved is not None and (found.moved[0].name in CAST_BEFORE or self.has_low_copy(found.moved[2])):
                primitive, params, array, rest = found.moved
                with compat.mesh_of(value):
                    found.low = compat.bind(primitive, [self.low_copy(array), *rest], params)[0]
            else:
                found.low = low_copy(value, self._low) if found.weight else self.cast(value, self._low)
        return found.low

    def has_low_copy(self, value: Any) -> bool:
        """Whether a low copy exists of `value`, or of the value that it was moved from."""
        found = self._infos.get(id(value))
        if found is None:
            return False
        return found.low is not None or (found.moved is not None and self.has_low_copy(found.moved[2]))

    def was_gathered_low(self, value: Any) -> bool:
        """Whether the low copy of `value` was moved between devices in its place."""
        found = self._infos.get(id(value))
        if found is None or found.low is None or found.moved is None:
            return False
        return found.moved[0].name in CAST_BEFORE

    def record_move(self, primitive: Any, params: dict[str, Any], operands: Sequence[Any], result: Any) -> None:
        """`result` holds the elements of the first operand: facts about one apply to the other."""
        source = operands[0]
        if result is source:  # JAX returns the operand of a no-op
            return
        found = self._infos.get(id(source))
        constant = magnitude(source) if found is None else found.constant
        if constant is not None:
            self._ensure(result).constant = constant
        if found is None:
            return
        if found.selects or found.widened:
            new = self._ensure(result)
            new.selects, new.widened = found.selects, found.widened
        if found.features and primitive.name in AXIS_ORDER:
            order = params[AXIS_ORDER[primitive.name]]
            features = (frozenset(new for new, old in enumerate(order) if old in axes) for axes in found.features)
            self._ensure(result).features = tuple(features)
        if dtype_of(result) != dtype_of(source) or not found.weight:
            return
        new = self._ensure(result)
        new.weight = True
        grown = np.size(result) > np.size(source) and primitive.name not in CAST_BEFORE
        new.broadcast = found.broadcast or grown
        new.moved = (primitive, params, source, tuple(operands[1:]))

    def cast(self, value: Any, dtype: Any) -> Any:
        """`value` in `dtype`, if autocast changes its dtype."""
        given = dtype_of(value)
        if given is None or given == dtype or not is_castable(given):
            return value
        if isinstance(value, np.ndarray | np.generic):
            return np.asarray(value).astype(dtype)
        if dtype != F32 or compat.is_concrete(value):
            return compat.convert(value, dtype)
        info = self._ensure(value)
        if info.wide is None:
            info.wide = compat.convert(value, dtype)
        return info.wide

    def adopts_dtype(self, value: Any, weak: bool, *, exact: bool = False) -> bool:
        """Whether `value` adopts the other operands' dtype.

        Numbers in range do, and a broadcast weight unless `exact`.
        """
        if weak:
            return True
        found = self._infos.get(id(value))
        if found is None:
            constant = magnitude(value)
            return constant is not None and self._in_range(constant)
        if found.constant is not None:
            return self._in_range(found.constant)
        return found.weight and found.broadcast and not exact

    def _in_range(self, constant: float) -> bool:
        # Subnormal numbers count as out of range: several devices flush them to zero.
        limits = jnp.finfo(self._low)
        return constant == 0 or float(limits.tiny) <= constant <= float(limits.max)

    def cast_operands(
        self, cast: Cast, values: Sequence[Any], weak: Sequence[bool], *, exact: bool = False
    ) -> list[Any]:
        """`values` in the dtypes that a primitive computes in under a cast; a primitive takes one floating dtype.

        Args:
            cast: the policy's.
            values: the operands.
            weak: which of them are weakly typed.
            exact: whether a rule of the user gives the cast: then only numbers adopt the dtype of other operands,
                otherwise also a bias, as torch's ``linear`` casts it with its product.
        """
        given = tuple(dtype_of(value) if is_castable(dtype_of(value)) else None for value in values)
        if cast in ("keep", "promote") and len({dtype for dtype in given if dtype is not None}) < 2:
            return list(values)
        product = None if exact else next((value for value in values if self._features(value)), None)
        biases = [product is not None and self._is_bias(value, product) for value in values]
        carried = tuple(
            None if is_bias or self.adopts_dtype(value, is_weak, exact=exact) else dtype
            for dtype, value, is_weak, is_bias in zip(given, values, weak, biases, strict=True)
        )
        of = given if all(dtype is None for dtype in carried) else carried
        used = cast_dtypes(cast, of, self._low, F32, mixed=False, asks_result=False).operands
        target = next((dtype for dtype in used if dtype is not None), None)
        promoted = list(values)
        for index, is_bias in enumerate(biases):
            if is_bias and target == self._low:
                # Spread before the cast, so that the gradient of the bias adds up in float32.
                shape: tuple[int, ...] = np.shape(product)  # type: ignore[arg-type]
                promoted[index] = lax.broadcast_in_dim(values[index], shape, tuple(range(len(shape))))
        return promoted if target is None else [self.cast(value, target) for value in promoted]

    def _features(self, value: Any) -> tuple[frozenset[int], ...]:
        found = self._infos.get(id(value))
        return found.features if found is not None else ()

    def _is_bias(self, value: Any, product: Any) -> bool:
        """Whether `value` is a weight that is spread along all axes of `product` but those of one weight in it."""
        own, shape = np.shape(value), np.shape(product)
        found = self._infos.get(id(value))
        if found is None or not found.weight or len(own) != len(shape):
            return False
        spread = np.size(value) < np.size(product) or (found.moved and np.ndim(found.moved[2]) < len(own))
        fits = all(size in (1, full) for size, full in zip(own, shape, strict=True))
        axes = {axis for axis, size in enumerate(own) if size > 1}
        return bool(spread and fits and any(axes <= features for features in self._features(product)))


def magnitude(value: Any) -> float | None:
    """The magnitude of a scalar constant of the program; None for other values.  Infinity counts as in range."""
    if not isinstance(value, np.ndarray | np.generic) or np.ndim(value) or not is_castable(value.dtype):
        return None
    size = abs(float(value))
    return 0.0 if np.isinf(size) or np.isnan(size) else size
