"""Shared code for higher-order primitives: re-tracing of sub-jaxprs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from xla_amp import events
from xla_amp.jax import compat
from xla_amp.jax.interpreter import HigherOrderCall
from xla_amp.jax.value_info import magnitude

_retraced: weakref.WeakKeyDictionary[Any, dict[Any, compat.ClosedJaxpr]] = weakref.WeakKeyDictionary()
"""Jaxpr -> settings and argument types -> result, so that a function that is called again is compiled once."""


def retrace(
    call: HigherOrderCall,
    closed: compat.ClosedJaxpr,
    values: Sequence[Any],
    weights: tuple[bool, ...],
    *,
    keep_constants: bool = True,
    copied: tuple[int, ...] = (),
    f32_outputs: tuple[bool, ...] | None = None,
) -> compat.ClosedJaxpr:
    """Traces a sub-jaxpr under autocast for arguments of the types of `values`.

    Args:
        call: the primitive that contains it.
        closed: the sub-jaxpr.
        values: its arguments.
        weights: which of them come from outside the program.
        keep_constants: whether a scalar constant among `values` is a constant inside, too.
        copied: indices of arguments whose low copies follow as further arguments.
        f32_outputs: as for `Interpreter.eval_jaxpr`.
    """
    low = call.interpreter.settings.low
    avals = [*avals_of(values), *(compat.with_dtype(compat.typeof(values[index]), low) for index in copied)]
    interpreter = call.inner_interpreter()
    constants = {i: value for i, value in enumerate(values) if keep_constants and magnitude(value) is not None}
    constants_key = tuple((i, str(value.dtype), float(value)) for i, value in constants.items())
    settings_key = (interpreter.settings, interpreter.settings.current_policy(), interpreter.backward)
    key = (*settings_key, tuple(avals), weights, constants_key, copied, f32_outputs)
    cache = _retraced.setdefault(closed.jaxpr, {})
    traced = cache.get(key) if not closed.consts else None
    if traced is None or events.sinks:

        def evaluate(*arguments: Any) -> list[Any]:
            inside = [constants.get(i, argument) for i, argument in enumerate(arguments[: len(values)])]
            for index, copy in zip(copied, arguments[len(values) :], strict=True):
                interpreter.table.set_low_copy(inside[index], copy)
            return interpreter.eval_jaxpr(closed, inside, weights=weights, f32_outputs=f32_outputs)

        traced = compat.trace(evaluate, avals, closed.jaxpr.debug_info)
        if not closed.consts:
            cache[key] = traced
    return traced


def avals_of(values: Sequence[Any]) -> list[Any]:
    """Abstract values of `values`."""
    return [compat.typeof(value) for value in values]
