"""Values of one program, or of one region of a running one, and what is known of them.

What matters of a value beside its dtype: whether it is a *weight* (it came from outside, so its gradient is wanted in
float32), whether it is a *constant* (it fits any dtype in whose range it is), and which low copy of it exists.
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
from xla_amp.jax.decisions import F32, Rules, dtype_of, is_float


@dataclasses.dataclass(slots=True)
class Note:
    """What is known of a value."""

    value: Any
    """The value itself, so that its identity is not given to another one meanwhile; a weak reference to an array that
    has been computed, which would take memory."""
    weight: bool = False
    spread: bool = False
    """Whether it was broadcast from fewer elements."""
    constant: float | None = None
    """The largest magnitude of a constant."""
    low: Any = None
    """Its low copy."""
    moved: tuple[Any, dict[str, Any], Any, Sequence[Any]] | None = None
    """Primitive, parameters, array and further operands that it was moved with."""


class Frame:
    """What is known of the values of one program."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._notes: dict[int, Note] = {}

    def note(self, value: Any) -> Note | None:
        """What is known of `value`."""
        return self._notes.get(id(value))

    def _noted(self, value: Any) -> Note:
        found = self._notes.get(id(value))
        if found is None:
            found = self._notes[id(value)] = Note(self._kept(value))
        return found

    def _kept(self, value: Any) -> Any:
        if not compat.is_array(value) or not compat.is_concrete(value):
            return value
        key, notes = id(value), self._notes
        return weakref.ref(value, lambda _: notes.pop(key, None))

    def mark_made(self, value: Any) -> None:
        """`value` was computed inside."""
        if is_float(dtype_of(value)):
            self._noted(value)

    def mark_weight(self, value: Any) -> None:
        """`value` comes from outside."""
        if dtype_of(value) == F32:
            self._noted(value).weight = True

    def is_weight(self, value: Any) -> bool:
        """Whether `value`, or what it was moved from, comes from outside."""
        found = self.note(value)
        return found is not None and found.weight

    def give_low(self, value: Any, low: Any) -> None:
        """`low` is the low copy of `value`."""
        self._noted(value).low = low

    def low_copy(self, value: Any) -> Any:
        """The low copy of `value`, made once; no gradient passes through that of a weight."""
        found = self._notes.get(id(value))
        if found is None:
            low = self.cast(value, self.rules.low)
            if not compat.is_concrete(value):
                self._noted(value).low = low
            return low
        if found.low is None:
            if found.moved is not None and self.has_low(found.moved[2]):
                primitive, params, array, rest = found.moved
                found.low = compat.bind(primitive, [self.low_copy(array), *rest], params)[0]
            else:
                found.low = low_copy(value, self.rules.low) if found.weight else self.cast(value, self.rules.low)
        return found.low

    def has_low(self, value: Any) -> bool:
        """Whether a low copy of `value`, or of what it was moved from, exists."""
        found = self._notes.get(id(value))
        if found is None:
            return False
        return found.low is not None or (found.moved is not None and self.has_low(found.moved[2]))

    def moved(self, primitive: Any, params: dict[str, Any], operands: Sequence[Any], result: Any) -> None:
        """`result` is the first operand in another place; what is known of one holds for the other."""
        source = operands[0]
        if result is source:  # JAX passes on what stays where it is
            return
        found = self._notes.get(id(source))
        constant = magnitude(source) if found is None else found.constant
        if constant is not None:
            self._noted(result).constant = constant
        if found is None or dtype_of(result) != dtype_of(source) or not found.weight:
            return
        new = self._noted(result)
        new.weight = True
        new.spread = found.spread or np.size(result) > np.size(source)
        new.moved = (primitive, params, source, tuple(operands[1:]))

    def cast(self, value: Any, dtype: Any) -> Any:
        """`value` in `dtype`, if it is a float that casts apply to."""
        given = dtype_of(value)
        if given is None or given == dtype or not is_float(given):
            return value
        if isinstance(value, np.ndarray | np.generic):
            return np.asarray(value).astype(dtype)
        return lax.convert_element_type(value, dtype)

    def follows(self, value: Any, weak: bool) -> bool:
        """Whether `value` takes the dtype of what it meets: a constant in range, or a weight spread over it."""
        if weak:
            return True
        found = self._notes.get(id(value))
        if found is None:
            constant = magnitude(value)
            return constant is not None and self._in_range(constant)
        if found.constant is not None:
            return self._in_range(found.constant)
        return found.weight and found.spread

    def _in_range(self, constant: float) -> bool:
        return constant <= float(jnp.finfo(self.rules.low).max)

    def unified(self, values: Sequence[Any], weak: Sequence[bool]) -> list[Any]:
        """`values` with all floats in the widest dtype of those that do not follow others."""
        dtypes = {dtype_of(value) for value in values if is_float(dtype_of(value))}
        if len(dtypes) < 2:
            return list(values)
        votes = {
            dtype_of(value)
            for value, is_weak in zip(values, weak, strict=True)
            if is_float(dtype_of(value)) and not self.follows(value, is_weak)
        } or dtypes
        target = votes.pop() if len(votes) == 1 else F32
        return [self.cast(value, target) for value in values]


def magnitude(value: Any) -> float | None:
    """The magnitude of a scalar that the program text holds; None for anything else. Infinity counts as in range."""
    if not isinstance(value, np.ndarray | np.generic) or np.ndim(value) or not is_float(value.dtype):
        return None
    size = abs(float(value))
    return 0.0 if np.isinf(size) or np.isnan(size) else size
