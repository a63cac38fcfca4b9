"""Rules for ``scan`` and ``while``: dtypes of the carry, and casts of weights hoisted out of the loop.

The carry keeps its dtype, or takes the low dtype if it is a residual stream that the region makes low.  A float32
weight that the body contracts is rounded once, before the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import mapped_aval

from xla_amp.jax import compat, interpreter, rebind
from xla_amp.jax.analysis.exact_reads import exact_results_of_body
from xla_amp.jax.analysis.jaxprs import contracted_arguments, has_backward, residual_carries
from xla_amp.jax.analysis.solver_loops import ends_by_floats
from xla_amp.jax.decisions import F32, dtype_of, is_castable
from xla_amp.jax.higher_order.common import cast, low_copies, retrace, with_low_copies
from xla_amp.jax.interpreter import HigherOrderCall
from xla_amp.jax.value_info import Value, arguments, arrays_of, inside
from xla_amp.policy import effects, op_catalog
from xla_amp.policy.policy import ENDS_BY_FLOATS


def scan(call: HigherOrderCall) -> list[Value]:
    """``lax.scan``."""
    body = rebind.inner(call.params)
    consts, start, xs = rebind.scanned(call.params, call.values)
    consts = _with_wide_gradients(call, consts, body.jaxpr)
    x_avals = [mapped_aval(call.params["length"], 0, jax.typeof(x.array)) for x in xs]
    given, traced = _traced_body(call, body, consts, start, x_avals, [x.facts.weight for x in xs])
    return call.bind([*given, *arrays_of(xs)], traced)


def _with_wide_gradients(call: HigherOrderCall, consts: Sequence[Value], body: Any) -> list[Value]:
    """Constants of ``scan``, of which low ones that no contraction of the body reads are float32.

    Each iteration adds to the gradient of a constant, in its dtype.
    """
    around = call.interpreter
    contracted = contracted_arguments(body, around.settings.policy)
    kept = around.backward or bool(around.settings.as_written)
    return [
        value
        if kept or reads or dtype_of(value.array) != around.settings.low
        else Value(around.casts.cast(value, F32), value.facts)
        for value, reads in zip(consts, contracted, strict=False)
    ]


def while_loop(call: HigherOrderCall) -> list[Value]:
    """``lax.while_loop``."""
    condition: compat.ClosedJaxpr = call.params["cond_jaxpr"]
    condition_consts, consts, start = rebind.looped(call.params, call.values)
    # Iterations are steps of a solver or a search, not layers: no small term may be lost, whatever `residual` says.
    settings = dataclasses.replace(call.interpreter.settings, residual="keep", as_written=_why_as_written(call))
    within = call.interpreter.under(settings)
    call = dataclasses.replace(call, interpreter=within)
    if settings.as_written:
        written = within.cast_to_avals(call.values, interpreter.avals_of(call.eqn))
        call = dataclasses.replace(call, values=list(map(inside, written)))
    given, traced = _traced_body(call, call.params["body_jaxpr"], consts, start, (), ())
    operands = [*arrays_of(condition_consts), *given[len(given) - len(start) :]]
    no_weights = (False,) * len(operands)
    traced_condition = retrace(call, condition, operands, no_weights, keep_constants=False)
    return call.bind([*arrays_of(condition_consts), *given], traced_condition, traced)


def _why_as_written(call: HigherOrderCall) -> str:
    """Why a ``while`` stays in the dtypes that it was written with; empty if the policy decides about its inside."""
    around, settings = call.interpreter, call.interpreter.settings
    if settings.as_written:
        return settings.as_written
    policy, path = around.settings.policy, around.path(call.eqn)
    effects.note(policy.reaching(op_catalog.WHILE_LOOP, path), "", path)
    decision = policy.decision(op_catalog.WHILE_LOOP, path)
    if decision.from_user:
        return decision.why if decision.cast == "fp32" else ""
    again = settings.solves and call.inner_interpreter().backward
    return ENDS_BY_FLOATS if again or ends_by_floats(call.eqn, policy) else ""


def _traced_body(
    call: HigherOrderCall,
    body: compat.ClosedJaxpr,
    consts: Sequence[Value],
    start: Sequence[Value],
    x_avals: Sequence[Any],
    x_weights: Sequence[bool],
) -> tuple[list[Any], compat.ClosedJaxpr]:
    """The constants with low copies and the initial carry, and the body that takes them and what is scanned.

    `x_avals` are the types of what an iteration gets besides; `x_weights`: which of these come from outside.
    """
    f32_outputs = exact_results_of_body(call.eqn, call.f32_outputs or (True,) * len(call.eqn.outvars))
    if call.inner_interpreter().backward or has_backward(body.jaxpr):  # the carry may add gradients up
        f32_outputs = (*(True,) * len(start), *f32_outputs[len(start) :])
    settings = call.interpreter.settings
    copied, copies = ((), []) if settings.as_written else low_copies(call, consts, body.jaxpr, hoist=True)
    hoisted = [*arrays_of(consts), *copies]
    weights = (*(dtype_of(value.array) == F32 for value in consts), *(False,) * len(start), *x_weights)

    def trace(carry: Sequence[Any], *, keep: bool) -> compat.ClosedJaxpr:
        def evaluate(*values: Any) -> list[Any]:
            low = values[len(consts) : len(hoisted)]
            given = arguments((*values[: len(consts)], *values[len(hoisted) :]), weights)
            for value, const in zip(given, consts, strict=False):
                value.facts = value.facts if const.facts.weight else value.facts._replace(axes=())
            given = with_low_copies(given, copied, low)
            outs = arrays_of(call.inner_interpreter().eval_jaxpr(body, given, f32_outputs=f32_outputs))
            return [*map(cast, outs, [t.dtype for t in carry]), *outs[len(carry) :]] if keep else outs

        return compat.trace(evaluate, (*map(jax.typeof, hoisted), *carry, *x_avals), body.jaxpr.debug_info)

    first = len(consts)
    avals = body.in_avals[first : first + len(start)]
    streams = settings.residual == "low" and not settings.as_written
    if streams and any(may_be_low := residual_carries(body.jaxpr, first, len(start))):
        avals = _low_carry(avals, may_be_low, settings.low, lambda carry: trace(carry, keep=False).out_avals)
    init = [cast(value.array, aval.dtype) for value, aval in zip(start, avals, strict=True)]
    return [*hoisted, *init], trace(avals, keep=True)


def _low_carry(
    avals: Sequence[Any], may_be_low: Sequence[bool], low: Any, computed: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Types of the carry: low where that is allowed and the body computes low.

    `computed`: types that the body computes from types of the carry, without casts back to these.
    """
    dtypes = [aval.dtype for aval in avals]
    tried = [low if dtype == F32 and may else dtype for dtype, may in zip(dtypes, may_be_low, strict=True)]
    # Start with all floats low and restore those that the body widens, until nothing changes.
    while True:
        carry = [
            compat.with_dtype(aval, dtype) if is_castable(dtype) and aval.dtype != dtype else aval
            for aval, dtype in zip(avals, tried, strict=True)
        ]
        outs = [aval.dtype for aval in computed(carry)[: len(carry)]]
        settled = [
            wish if wish == dtype or out == low else dtype for wish, dtype, out in zip(tried, dtypes, outs, strict=True)
        ]
        if settled == tried:
            return carry
        tried = settled
