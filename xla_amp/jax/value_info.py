"""Facts about the values of one program or region: weights, constants and their low-precision copies.

A *weight* comes from outside the program, so its gradient is wanted in float32.  A *constant* adopts any dtype whose
range holds it.  A low copy of a value is made once.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_amp.jax import compat
from xla_amp.jax.contraction_primitives import low_copy
from xla_amp.jax.decisions import F32, dtype_of, is_castable


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
    moved: tuple[Any, dict[str, Any], Any, Sequence[Any]] | None = None
    """Data movement that made it: primitive, parameters, source array and further operands."""


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
        return weakref.ref(value, lambda _: infos.pop(key, None))

    def mark_computed(self, value: Any) -> None:
        """`value` was computed inside."""
        if is_castable(dtype_of(value)):
            self._ensure(value)

    def mark_adopting(self, value: Any) -> None:
        """`value` stands for a constant in range."""
        self._ensure(value).constant = 1.0

    def mark_weight(self, value: Any) -> None:
        """`value` comes from outside."""
        if dtype_of(value) == F32:
            self._ensure(value).weight = True

    def is_weight(self, value: Any) -> bool:
        """Whether `value`, or the value that it was moved from, comes from outside."""
        found = self.get(value)
        return found is not None and found.weight

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
            if found.moved is not None and self.has_low_copy(found.moved[2]):
                primitive, params, array, rest = found.moved
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

    def record_move(self, primitive: Any, params: dict[str, Any], operands: Sequence[Any], result: Any) -> None:
        """`result` holds the elements of the first operand: facts about one apply to the other."""
        source = operands[0]
        if result is source:  # JAX returns the operand of a no-op
            return
        found = self._infos.get(id(source))
        constant = magnitude(source) if found is None else found.constant
        if constant is not None:
            self._ensure(result).constant = constant
        if found is None or dtype_of(result) != dtype_of(source) or not found.weight:
            return
        new = self._ensure(result)
        new.weight = True
        new.broadcast = found.broadcast or np.size(result) > np.size(source)
        new.moved = (primitive, params, source, tuple(operands[1:]))

    def cast(self, value: Any, dtype: Any) -> Any:
        """`value` in `dtype`, if autocast changes its dtype."""
        given = dtype_of(value)
        if given is None or given == dtype or not is_castable(given):
            return value
        if isinstance(value, np.ndarray | np.generic):
            return np.asarray(value).astype(dtype)
        return lax.convert_element_type(value, dtype)

    def adopts_dtype(self, value: Any, weak: bool) -> bool:
        """Whether `value` adopts the dtype of the other operands: a constant in range, or a broadcast weight."""
        if weak:
            return True
        found = self._infos.get(id(value))
        if found is None:
            constant = magnitude(value)
            return constant is not None and self._in_range(constant)
        if found.constant is not None:
            return self._in_range(found.constant)
        return found.weight and found.broadcast

    def _in_range(self, constant: float) -> bool:
        return constant <= float(jnp.finfo(self._low).max)

    def promote(self, values: Sequence[Any], weak: Sequence[bool]) -> list[Any]:
        """`values` with all floats in the widest dtype of those that do not adopt another."""
        dtypes = {dtype_of(value) for value in values if is_castable(dtype_of(value))}
        if len(dtypes) < 2:
            return list(values)
        candidates = {
            dtype_of(value)
            for value, is_weak in zip(values, weak, strict=True)
            if is_castable(dtype_of(value)) and not self.adopts_dtype(value, is_weak)
        } or dtypes
        target = candidates.pop() if len(candidates) == 1 else F32
        return [self.cast(value, target) for value in values]


def magnitude(value: Any) -> float | None:
    """The magnitude of a scalar constant of the program; None for other values.  Infinity counts as in range."""
    if not isinstance(value, np.ndarray | np.generic) or np.ndim(value) or not is_castable(value.dtype):
        return None
    size = abs(float(value))
    return 0.0 if np.isinf(size) or np.isnan(size) else size
