"""Loops: what they carry keeps its dtype, or takes the low one where the region asks and the body gives it.

A float32 weight that a loop contracts is rounded once, before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xla_amp.jax import compat
from xla_amp.jax.contraction_primitives import low_copy
from xla_amp.jax.decisions import F32, dtype_of, is_float
from xla_amp.jax.higher_order.common import Call, contracted, retrace, types_of


def scan(call: Call) -> list[Any]:
    """``lax.scan``."""
    params = call.params
    constants, carry = compat.scan_counts(params)
    carried = constants + carry
    closed: compat.ClosedJaxpr = params["jaxpr"]
    steps = [compat.slice_aval(compat.typeof(x), params["length"]) for x in call.operands[carried:]]
    consts, copies, places = _hoisted(call, call.operands[:constants], closed.jaxpr)
    weights = (*(dtype_of(c) == F32 for c in consts), *(False,) * carry, *call.flags()[carried:])
    results = closed.jaxpr.outvars[carry:]
    wanted = (*(True,) * carry, *(call.wanted[carry:] or (False,) * len(results)))

    def body(carry_types: Sequence[Any]) -> Callable[..., list[Any]]:
        def walked(*values: Any) -> list[Any]:
            originals, low = values[:constants], values[constants : constants + len(copies)]
            rest = values[constants + len(copies) :]
            walker = call.walk()
            for place, copy in zip(places, low, strict=True):
                walker.frame.give_low(originals[place], copy)
            outs = walker.run(closed, (*originals, *rest), weights=weights, wanted=wanted)
            return [*map(call.cast, outs, [t.dtype for t in carry_types]), *outs[len(carry_types) :]]

        return walked

    start, traced = _settled(
        call,
        call.operands[constants:carried],
        closed.in_avals[constants:carried],
        lambda types: compat.trace(
            body(types), (*types_of([*consts, *copies]), *types, *steps), closed.jaxpr.debug_info
        ),
        lambda values, types: _free_results(call, closed, [*consts], copies, places, weights, values, steps),
    )
    operands = [*traced.consts, *consts, *copies, *start, *call.operands[carried:]]
    new = compat.scan_params(params, _closed(traced), len(traced.consts) + constants + len(copies))
    return compat.bind(call.primitive, operands, new)


def while_loop(call: Call) -> list[Any]:
    """``lax.while_loop``."""
    params = call.params
    split = params["cond_nconsts"]
    start = split + params["body_nconsts"]
    test: compat.ClosedJaxpr = params["cond_jaxpr"]
    body: compat.ClosedJaxpr = params["body_jaxpr"]
    consts, copies, places = _hoisted(call, call.operands[split:start], body.jaxpr)
    weights = (*(dtype_of(c) == F32 for c in consts), *(False,) * (len(call.operands) - start))

    def walked(types: Sequence[Any]) -> Callable[..., list[Any]]:
        def run(*values: Any) -> list[Any]:
            originals, low = values[: len(consts)], values[len(consts) : len(consts) + len(copies)]
            walker = call.walk()
            for place, copy in zip(places, low, strict=True):
                walker.frame.give_low(originals[place], copy)
            outs = walker.run(body, (*originals, *values[len(consts) + len(copies) :]), weights=weights)
            return list(map(call.cast, outs, [t.dtype for t in types]))

        return run

    values, traced = _settled(
        call,
        call.operands[start:],
        body.in_avals[len(consts) :],
        lambda types: compat.trace(walked(types), (*types_of([*consts, *copies]), *types), body.jaxpr.debug_info),
        lambda types, _: _free_results(call, body, consts, copies, places, weights, types, ()),
    )
    asks = [*call.operands[:split], *values]
    tested = retrace(call, test, asks, (False,) * len(asks), fixed=False)
    new = {**params, "cond_jaxpr": _closed(tested), "body_jaxpr": _closed(traced)}
    new["cond_nconsts"] = split + len(tested.consts)
    new["body_nconsts"] = len(consts) + len(copies) + len(traced.consts)
    operands = [*tested.consts, *call.operands[:split], *traced.consts, *consts, *copies, *values]
    return compat.bind(call.primitive, operands, new)


def _free_results(
    call: Call,
    closed: compat.ClosedJaxpr,
    consts: list[Any],
    copies: list[Any],
    places: list[int],
    weights: tuple[bool, ...],
    carried: Sequence[Any],
    steps: Sequence[Any],
) -> list[Any]:
    """dtypes that the body gives what it carries, if nothing is cast back."""
    walker = call.walk()

    def walked(*values: Any) -> list[Any]:
        return list(walker.run(closed, values, weights=weights))

    outs = compat.trace(walked, (*types_of(consts), *carried, *steps), closed.jaxpr.debug_info).out_avals
    return [aval.dtype for aval in outs[: len(carried)]]


def _settled(
    call: Call,
    values: Sequence[Any],
    avals: Sequence[Any],
    trace: Callable[[Sequence[Any]], compat.ClosedJaxpr],
    gives: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
) -> tuple[list[Any], compat.ClosedJaxpr]:
    """What a loop starts with and its body: in the dtypes of the program text, or low where the body gives low."""
    low = call.walker.rules.low
    dtypes = [aval.dtype for aval in avals]
    if call.walker.rules.carry == "low":
        lowered = [low if dtype == F32 else dtype for dtype in dtypes]
        while True:
            types = [_with(aval, dtype) for aval, dtype in zip(avals, lowered, strict=True)]
            given = gives(types, avals)
            settled = [
                wish if wish == dtype or out == low else dtype
                for wish, dtype, out in zip(lowered, dtypes, given, strict=True)
            ]
            if settled == lowered:
                break
            lowered = settled
        dtypes = lowered
    types = [_with(aval, dtype) for aval, dtype in zip(avals, dtypes, strict=True)]
    return [call.cast(value, dtype) for value, dtype in zip(values, dtypes, strict=True)], trace(types)


def _with(aval: Any, dtype: Any) -> Any:
    return compat.with_dtype(aval, dtype) if is_float(dtype) and aval.dtype != dtype else aval


def _hoisted(call: Call, consts: Sequence[Any], jaxpr: Any) -> tuple[list[Any], list[Any], list[int]]:
    """Low copies of what a loop contracts in every step, made before it; the places of what they are copies of."""
    policy = call.walker.rules.now()
    used = contracted(jaxpr, policy)
    places = [i for i, const in enumerate(consts) if dtype_of(const) == F32 and used[i]]
    low = call.walker.rules.low
    copies = []
    for place in places:
        value = consts[place]
        known = call.walker.frame.has_low(value) and call.walker.frame.is_weight(value)
        copies.append(call.walker.frame.low_copy(value) if known else low_copy(value, low))
    return list(consts), copies, places


def _closed(traced: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    return compat.ClosedJaxpr(compat.without_constants(traced), ()) if traced.consts else traced
