"""Rules for ``scan`` and ``while``: dtypes of the carry, and casts of weights hoisted out of the loop.

The carry keeps its dtype, or takes the low dtype if the region asks for that and the body computes it.  A float32
weight that the body contracts is rounded once, before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xla_amp.jax import compat
from xla_amp.jax.contraction_primitives import low_copy
from xla_amp.jax.decisions import F32, dtype_of, is_castable
from xla_amp.jax.higher_order.common import avals_of, cast, retrace, with_low_copies
from xla_amp.jax.interpreter import HigherOrderCall
from xla_amp.jax.jaxpr_analysis import contracted_arguments, residual_carries
from xla_amp.jax.value_info import Value, arguments, arrays_of


def scan(call: HigherOrderCall) -> list[Value]:
    """``lax.scan``."""
    params = call.params
    num_consts, num_carry = compat.scan_counts(params)
    first_xs = num_consts + num_carry
    closed: compat.ClosedJaxpr = params["jaxpr"]
    x_avals = [compat.slice_aval(compat.typeof(x), params["length"]) for x in call.operands[first_xs:]]
    consts = call.operands[:num_consts]
    copies, copied = _hoist_low_copies(call, call.values[:num_consts], closed.jaxpr)
    weights = (*(dtype_of(c) == F32 for c in consts), *(False,) * num_carry, *call.weight_flags()[first_xs:])
    ys = closed.jaxpr.outvars[num_carry:]
    f32_outputs = (*(True,) * num_carry, *(call.f32_outputs[num_carry:] or (False,) * len(ys)))

    def body(carry_avals: Sequence[Any]) -> Callable[..., list[Any]]:
        def evaluate(*values: Any) -> list[Any]:
            originals, low = values[:num_consts], values[num_consts : num_consts + len(copies)]
            rest = values[num_consts + len(copies) :]
            given = with_low_copies(arguments((*originals, *rest), weights), copied, low)
            outs = arrays_of(call.inner_interpreter().eval_jaxpr(closed, given, f32_outputs=f32_outputs))
            return [*map(cast, outs, [t.dtype for t in carry_avals]), *outs[len(carry_avals) :]]

        return evaluate

    init, traced = _trace_with_carry(
        call,
        call.operands[num_consts:first_xs],
        closed.in_avals[num_consts:first_xs],
        lambda carry: compat.trace(
            body(carry), (*avals_of([*consts, *copies]), *carry, *x_avals), closed.jaxpr.debug_info
        ),
        lambda carry: _uncast_carry_dtypes(call, closed, consts, weights, carry, x_avals),
        _may_be_low(call, closed, num_consts, num_carry),
    )
    operands = [*traced.consts, *consts, *copies, *init, *call.operands[first_xs:]]
    new = compat.scan_params(params, _constants_as_arguments(traced), len(traced.consts) + num_consts + len(copies))
    return call.bind(operands, new)


def while_loop(call: HigherOrderCall) -> list[Value]:
    """``lax.while_loop``."""
    params = call.params
    first_body_const = params["cond_nconsts"]
    first_carry = first_body_const + params["body_nconsts"]
    condition: compat.ClosedJaxpr = params["cond_jaxpr"]
    body: compat.ClosedJaxpr = params["body_jaxpr"]
    consts = call.operands[first_body_const:first_carry]
    copies, copied = _hoist_low_copies(call, call.values[first_body_const:first_carry], body.jaxpr)
    weights = (*(dtype_of(c) == F32 for c in consts), *(False,) * (len(call.operands) - first_carry))

    def body_for(carry_avals: Sequence[Any]) -> Callable[..., list[Any]]:
        def evaluate(*values: Any) -> list[Any]:
            originals, low = values[: len(consts)], values[len(consts) : len(consts) + len(copies)]
            carry = values[len(consts) + len(copies) :]
            given = with_low_copies(arguments((*originals, *carry), weights), copied, low)
            outs = arrays_of(call.inner_interpreter().eval_jaxpr(body, given))
            return list(map(cast, outs, [t.dtype for t in carry_avals]))

        return evaluate

    init, traced = _trace_with_carry(
        call,
        call.operands[first_carry:],
        body.in_avals[len(consts) :],
        lambda carry: compat.trace(body_for(carry), (*avals_of([*consts, *copies]), *carry), body.jaxpr.debug_info),
        lambda carry: _uncast_carry_dtypes(call, body, consts, weights, carry, ()),
        _may_be_low(call, body, len(consts), len(call.operands) - first_carry),
    )
    condition_operands = [*call.operands[:first_body_const], *init]
    no_weights = (False,) * len(condition_operands)
    traced_condition = retrace(call, condition, condition_operands, no_weights, keep_constants=False)
    new = {
        **params,
        "cond_jaxpr": _constants_as_arguments(traced_condition),
        "cond_nconsts": first_body_const + len(traced_condition.consts),
        "body_jaxpr": _constants_as_arguments(traced),
        "body_nconsts": len(consts) + len(copies) + len(traced.consts),
    }
    condition_consts = [*traced_condition.consts, *call.operands[:first_body_const]]
    return call.bind([*condition_consts, *traced.consts, *consts, *copies, *init], new)


def _uncast_carry_dtypes(
    call: HigherOrderCall,
    closed: compat.ClosedJaxpr,
    consts: Sequence[Any],
    weights: tuple[bool, ...],
    carry: Sequence[Any],
    x_avals: Sequence[Any],
) -> list[Any]:
    """dtypes that the body computes for the carry, without the casts back to the dtypes that it started with."""
    interpreter = call.inner_interpreter()

    def evaluate(*values: Any) -> list[Any]:
        return arrays_of(interpreter.eval_jaxpr(closed, arguments(values, weights)))

    outs = compat.trace(evaluate, (*avals_of(consts), *carry, *x_avals), closed.jaxpr.debug_info).out_avals
    return [aval.dtype for aval in outs[: len(carry)]]


def _may_be_low(call: HigherOrderCall, body: compat.ClosedJaxpr, first: int, count: int) -> Sequence[bool]:
    """For each carry, whether the region lets it be low: all, residual streams, or none."""
    settings = call.interpreter.settings
    if settings.carry == "low" or settings.residual == "keep":
        return [settings.carry == "low"] * count
    return residual_carries(body.jaxpr, first, count)


def _trace_with_carry(
    call: HigherOrderCall,
    init: Sequence[Any],
    avals: Sequence[Any],
    trace: Callable[[Sequence[Any]], compat.ClosedJaxpr],
    uncast_dtypes: Callable[[Sequence[Any]], list[Any]],
    may_be_low: Sequence[bool],
) -> tuple[list[Any], compat.ClosedJaxpr]:
    """Chooses the dtypes of the carry and traces the body: the jaxpr's dtypes, or low where the body computes low.

    Args:
        call: the loop.
        init: initial carry.
        avals: types of the carry in the jaxpr.
        trace: traces the body for these types of the carry.
        uncast_dtypes: dtypes that the body computes from these types of the carry.
        may_be_low: which of the carry may be low, if the body computes it low.
    """
    low = call.interpreter.settings.low
    dtypes = [aval.dtype for aval in avals]
    if any(may_be_low):
        tried = [low if dtype == F32 and may else dtype for dtype, may in zip(dtypes, may_be_low, strict=True)]
        # Start with all floats low and restore those that the body widens, until nothing changes.
        while True:
            outs = uncast_dtypes([_with_dtype(aval, dtype) for aval, dtype in zip(avals, tried, strict=True)])
            settled = [
                wish if wish == dtype or out == low else dtype
                for wish, dtype, out in zip(tried, dtypes, outs, strict=True)
            ]
            if settled == tried:
                break
            tried = settled
        dtypes = tried
    carry = [_with_dtype(aval, dtype) for aval, dtype in zip(avals, dtypes, strict=True)]
    return [cast(value, dtype) for value, dtype in zip(init, dtypes, strict=True)], trace(carry)


def _with_dtype(aval: Any, dtype: Any) -> Any:
    return compat.with_dtype(aval, dtype) if is_castable(dtype) and aval.dtype != dtype else aval


def _hoist_low_copies(call: HigherOrderCall, consts: Sequence[Value], jaxpr: Any) -> tuple[list[Any], list[int]]:
    """Low copies, made before the loop, of the constants that its body contracts; and the indices of these."""
    settings, casts = call.interpreter.settings, call.interpreter.casts
    used = contracted_arguments(jaxpr, settings.current_policy())
    indices = [i for i, const in enumerate(consts) if dtype_of(const.array) == F32 and used[i]]
    copies = []
    for index in indices:
        value = consts[index]
        reuse = value.has_low_copy() and value.is_weight()
        copies.append(casts.low_copy(value) if reuse else low_copy(value.array, settings.low))
    return copies, indices


def _constants_as_arguments(traced: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    return compat.ClosedJaxpr(compat.without_constants(traced), ()) if traced.consts else traced
