"""Shared code for higher-order primitives: re-tracing of sub-jaxprs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xla_amp.jax import compat, override_scope
from xla_amp.jax.analysis.jaxprs import contracted_arguments
from xla_amp.jax.decisions import F32, dtype_of, is_castable
from xla_amp.jax.interpreter import HigherOrderCall, Interpreter
from xla_amp.jax.low_primitives import low_copy
from xla_amp.jax.value_info import Facts, Value, arguments, arrays_of, inside
from xla_amp.policy import effects
from xla_amp.policy.effects import Remembered

_retraced: weakref.WeakKeyDictionary[Any, dict[Any, Remembered[tuple[compat.ClosedJaxpr, list[Any]]]]] = (
    weakref.WeakKeyDictionary()
)
"""Jaxpr -> settings and argument types -> result, so that a function that is called again is compiled once.

The result is kept with the constants of the jaxpr, by whose ``id`` it is found, and the rules that it follows.
"""


def retrace(
    call: HigherOrderCall,
    closed: compat.ClosedJaxpr,
    values: Sequence[Any],
    weights: tuple[bool, ...],
    *,
    keep_constants: bool = True,
    copied: tuple[int, ...] = (),
    f32_outputs: tuple[bool, ...] | None = None,
    keep_dtypes: bool = False,
    saves: bool | None = None,
) -> compat.ClosedJaxpr:
    """Traces a sub-jaxpr under autocast for arguments of the types of `values`.

    Args:
        weights: which arguments come from outside the program.
        keep_constants: whether a scalar constant among `values` may adopt the dtype of other operands inside, too.
        copied: indices of arguments whose low copies follow as further arguments.
        f32_outputs: as for `Interpreter.eval_jaxpr`.
        keep_dtypes: whether results have the dtypes of the sub-jaxpr.
        saves: as for `Interpreter`; None for that of the program around it.
    """
    low = call.interpreter.settings.low
    avals = [*map(jax.typeof, values), *(compat.with_dtype(jax.typeof(values[index]), low) for index in copied)]
    interpreter = call.inner_interpreter(saves=saves)
    numbers = enumerate(map(inside, values if keep_constants else ()))
    adopting = tuple(
        (index, stand_in)
        for index, number in numbers
        if (stand_in := interpreter.casts.stand_in(number.facts.constant)) is not None
    )
    key = (
        interpreter.settings,
        interpreter.backward,
        interpreter.saves,
        interpreter.scopes,
        tuple(avals),
        weights,
        adopting,
        copied,
        f32_outputs,
        keep_dtypes,
        tuple(map(id, closed.consts)),
    )

    def evaluate(*arrays: Any) -> list[Any]:
        given = with_low_copies(arguments(arrays[: len(values)], weights), copied, arrays[len(values) :])
        for index, number in adopting:
            given[index] = Value(given[index].array, Facts(constant=number))
        outs = arrays_of(interpreter.eval_jaxpr(closed, given, f32_outputs=f32_outputs))
        if keep_dtypes:
            outs = [cast(out, aval.dtype) for out, aval in zip(outs, closed.out_avals, strict=True)]
        return outs

    def trace() -> tuple[compat.ClosedJaxpr, list[Any]]:
        return compat.trace(evaluate, avals, closed.jaxpr.debug_info), closed.consts

    found = _retraced.setdefault(closed.jaxpr, {})
    traced, _ = effects.remembered(found, key, trace, place=interpreter.outer[0])
    return traced


def low_copies(
    call: HigherOrderCall, values: Sequence[Value], jaxpr: Any, *, hoist: bool = False
) -> tuple[tuple[int, ...], list[Any]]:
    """Indices of float32 operands that a jaxpr contracts, and their low copies.

    With `hoist`, copies are made outside of the jaxpr, a loop's body; otherwise those count that weights have.
    """
    settings, casts = call.interpreter.settings, call.interpreter.casts
    found: dict[int, Any] = {}
    contracted = contracted_arguments(jaxpr, call.interpreter.settings.policy)
    for index, (value, used) in enumerate(zip(values, contracted, strict=False)):
        if used and value.is_weight() and value.has_low_copy():
            found[index] = casts.low_copy(value)
        elif used and hoist and dtype_of(value.array) == F32:
            found[index] = low_copy(value.array, settings.low)
    return tuple(found), list(found.values())


def with_low_copies(values: list[Value], copied: Sequence[int], copies: Sequence[Any]) -> list[Value]:
    """`values`, of which those at the indices `copied` have these low copies."""
    for index, copy in zip(copied, copies, strict=True):
        values[index].low = copy
    return values


def evaluate_rule(
    interpreter: Interpreter,
    function: Callable[..., Sequence[Any]],
    debug_info: Any,
    values: Sequence[Any],
    *,
    avals: Sequence[Any] | None = None,
    weights: Sequence[bool] | None = None,
    keep_dtypes: bool = True,
) -> list[Any]:
    """Traces a function of a custom derivative as written, then evaluates the jaxpr under autocast.

    Symbolic zeros and Python scalars among `values`, such as a saved ``perturbed``, arrive as they are.

    Args:
        avals: the types of `values` that `function` is traced with; None for their own.
        weights: which arguments come from outside the program; None for all.
        keep_dtypes: whether results get the dtypes that `function` gave them.
    """
    interpreter = interpreter.under(interpreter.settings.now())
    traced = [_is_traced(value) for value in values]
    given = list(itertools.compress(values, traced))
    untraced_outs: list[tuple[int, Any]] = []

    def arrays(*given: Any) -> list[Any]:
        rest = iter(given)
        with override_scope.traced_here(interpreter.settings.policy):
            outs = function(*(next(rest) if is_traced else v for v, is_traced in zip(values, traced, strict=True)))
        untraced_outs[:] = [(index, out) for index, out in enumerate(outs) if not _is_traced(out)]
        return [out for out in outs if _is_traced(out)]

    types = list(map(jax.typeof, given)) if avals is None else list(itertools.compress(avals, traced))
    closed = compat.trace(arrays, types, debug_info)
    flags = None if weights is None else list(itertools.compress(weights, traced))
    outs = arrays_of(interpreter.eval_jaxpr(closed, arguments(given, flags)))
    if keep_dtypes:
        outs = [cast(out, aval.dtype) for out, aval in zip(outs, closed.out_avals, strict=True)]
    for index, out in untraced_outs:
        outs.insert(index, out)
    return outs


def cast(value: Any, dtype: Any) -> Any:
    """An array or symbolic zero in `dtype`, where casts apply to both."""
    given = dtype_of(value)
    if not (is_castable(given) and is_castable(dtype)) or given == dtype:
        return value
    if compat.is_zero(value):
        return type(value)(compat.with_dtype(value.aval, dtype))
    return compat.convert(value, dtype)


def _is_traced(value: Any) -> bool:
    if value is None or compat.is_zero(value) or isinstance(value, bool | int | float | complex):
        return False
    return bool(dtype_of(value) != jax.dtypes.float0)
