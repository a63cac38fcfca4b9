"""Rules for higher-order primitives: re-trace each sub-jaxpr under autocast and bind the primitive again.

So names, shardings, donation, checkpoint policies and all later transformations remain those of JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
from jax.extend.core import jaxpr_as_fun

from xla_amp.jax import compat, rebind
from xla_amp.jax.analysis.jaxprs import selecting_outputs
from xla_amp.jax.decisions import F32
from xla_amp.jax.higher_order.common import cast, evaluate_rule, low_copies, retrace
from xla_amp.jax.higher_order.loops import scan, while_loop
from xla_amp.jax.interpreter import HigherOrderCall, HigherOrderRules
from xla_amp.jax.low_primitives import original_call
from xla_amp.jax.value_info import Value, arguments, arrays_of


def _call(call: HigherOrderCall, *, saves: bool | None = None, **changed: Any) -> list[Value]:
    closed = rebind.inner(call.params)
    copied, copies = low_copies(call, call.values, closed.jaxpr)
    traced = retrace(
        call, closed, call.operands, call.weight_flags(), copied=copied, f32_outputs=call.f32_outputs, saves=saves
    )
    return call.bind([*call.operands, *copies], traced, **changed)


def _named_call(call: HigherOrderCall) -> list[Value]:
    flags = zip(_call(call), selecting_outputs(rebind.inner(call.params).jaxpr), strict=True)
    return [Value(out.array, out.facts._replace(selects=True)) if selects else out for out, selects in flags]


def _checkpoint(call: HigherOrderCall) -> list[Value]:
    return _call(call, saves=False, policy=_checkpoint_policy(call.params["policy"]))


@functools.lru_cache(maxsize=256)
def _checkpoint_policy(policy: Any) -> Any:
    """A checkpoint policy that sees JAX's contraction primitives instead of our own."""
    if policy is None:
        return None

    def saveable(primitive: Any, *avals: Any, **params: Any) -> Any:
        primitive, shown, settings = original_call(primitive, avals, params)
        return policy(primitive, *shown, **settings)

    return saveable


def _cond(call: HigherOrderCall) -> list[Value]:
    weights, f32_outputs = call.weight_flags()[1:], call.f32_outputs
    traced = [
        retrace(call, branch, call.operands[1:], weights, f32_outputs=f32_outputs) for branch in call.params["branches"]
    ]
    dtypes = [{aval.dtype for aval in avals} for avals in zip(*(each.out_avals for each in traced), strict=True)]
    wide = [each.pop() if len(each) == 1 else F32 for each in dtypes]
    return call.bind(call.operands, *(_with_results(branch, wide) for branch in traced))


def _with_results(branch: compat.ClosedJaxpr, dtypes: Sequence[Any]) -> compat.ClosedJaxpr:
    """A branch whose results have these dtypes."""
    if all(aval.dtype == dtype for aval, dtype in zip(branch.out_avals, dtypes, strict=True)):
        return branch

    def evaluate(*values: Any) -> list[Any]:
        return list(map(cast, jaxpr_as_fun(branch)(*values), dtypes))

    return compat.trace(evaluate, branch.in_avals, branch.jaxpr.debug_info)


def _custom_jvp(call: HigherOrderCall) -> list[Value]:
    closed = rebind.inner(call.params)
    if compat.runs_now(call.operands):
        values = arguments(call.operands, call.weight_flags())
        now = call.inner_interpreter(saves=False)
        return call.results(arrays_of(now.eval_jaxpr(closed, values, f32_outputs=call.f32_outputs)))
    traced = retrace(call, closed, call.operands, call.weight_flags(), f32_outputs=call.f32_outputs)
    _, rule = rebind.custom_functions(call.eqn)
    avals = closed.in_avals
    results = [aval.dtype for aval in traced.out_avals]
    interpreter = call.inner_interpreter()  # the rule outlives this call, so it must not keep the operands

    def primal(*values: Any) -> list[Any]:
        return list(jaxpr_as_fun(traced)(*values))

    def derivative(*values: Any) -> list[Any]:
        outs = evaluate_rule(
            interpreter,
            rule.call_wrapped,
            rule.debug_info,
            values,
            avals=(*avals, *(aval.to_tangent_aval() for aval in avals)),
            weights=[True] * len(avals) + [False] * len(avals),
            keep_dtypes=False,
        )
        return list(map(cast, outs, (*results, *results)))

    return call.bind(call.operands, primal, derivative)


def _custom_vjp(call: HigherOrderCall) -> list[Value]:
    closed = rebind.inner(call.params)
    _, forward, backward = rebind.custom_functions(call.eqn)
    rule = compat.BackwardRule(backward)
    results = [aval.dtype for aval in closed.out_avals]
    # The rules outlive this call, so they must not keep the operands.
    forwards, backwards = call.inner_interpreter(saves=False), call.inner_interpreter(backward=True)

    def primal(*values: Any) -> list[Any]:
        outs = forwards.eval_jaxpr(closed, arguments(values))
        return list(map(cast, arrays_of(outs), results))

    def fwd(*values: Any) -> list[Any]:
        return evaluate_rule(forwards, forward.call_wrapped, forward.debug_info, values)

    def bwd(*values: Any) -> Any:
        return rule.result(evaluate_rule(backwards, rule, backward.debug_info, values))

    operands = call.interpreter.cast_to_avals(call.values, closed.in_avals)
    if compat.runs_now(operands):
        return call.results(primal(*operands))
    return call.bind(operands, primal, fwd, bwd)


def _shard_map(call: HigherOrderCall) -> list[Value]:
    params, closed = call.params, rebind.inner(call.params)
    weights = call.weight_flags()
    f32_outputs = call.f32_outputs
    residuals = [var in call.interpreter.residuals for var in call.eqn.outvars]

    def shard(*values: Any) -> list[Any]:
        outs = call.inner_interpreter().eval_jaxpr(closed, arguments(values, weights), f32_outputs=f32_outputs)
        flags = zip(outs, residuals, strict=True)
        return [out.low if residual and out.was_gathered_low() else out.array for out, residual in flags]

    operands = call.operands
    # `jax.shard_map` adds up the gradients of what all devices read
    if compat.low_sums_crash(params["mesh"], params["newly_manual_axes"]):
        operands = [cast(value, F32) for value in operands]
    return call.bind(operands, shard)


def _linear_call(call: HigherOrderCall) -> list[Value]:
    interpreter = call.inner_interpreter(backward=True)

    thunk = call.params["transpose_thunk"]

    @functools.cache
    def transpose() -> Any:
        closed, consts = thunk()
        traced = compat.trace(
            lambda *values: evaluate_rule(interpreter, jaxpr_as_fun(closed), closed.jaxpr.debug_info, values),
            closed.in_avals,
            closed.jaxpr.debug_info,
        )
        return compat.ClosedJaxpr(compat.without_constants(traced), ()), [*traced.consts, *consts]

    return _call_as_written(call, transpose_thunk=transpose)


def _custom_vmap(call: HigherOrderCall) -> list[Value]:
    rule, interpreter = call.params["rule"], call.inner_interpreter()
    debug_info = rebind.inner(call.params).jaxpr.debug_info

    def batched(axis_size: int, in_batched: Any, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        specs: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            out, out_batched = rule(axis_size, in_batched, *jax.tree.unflatten(tree, values))
            outs, out_tree = jax.tree.flatten(out)
            specs[:] = [out_tree, out_batched]
            return outs

        outs = evaluate_rule(interpreter, flat, debug_info, leaves)
        return jax.tree.unflatten(specs[0], outs), specs[1]

    return _call_as_written(call, rule=functools.wraps(rule)(batched))


def _call_as_written(call: HigherOrderCall, **changed: Any) -> list[Value]:
    """Binds a primitive again whose operands and results keep the dtypes that it was written for.

    Its jaxpr takes all operands and has no constants.

    `changed`: parameters besides the jaxpr.
    """
    closed = rebind.inner(call.params)
    operands = call.interpreter.cast_to_avals(call.values, closed.in_avals)
    traced = retrace(call, closed, operands, call.weight_flags(), keep_dtypes=True)
    if traced.consts:  # arrays that the policy's rules need inside; the primitive takes no further operands
        return call.results(rebind.bind_as_written(call.eqn, operands))
    return call.bind(operands, traced, **changed)


HIGHER_ORDER_RULES: Final[HigherOrderRules] = MappingProxyType(
    {
        "call": _named_call,
        "checkpoint": _checkpoint,
        "composite": _call_as_written,
        "cond": _cond,
        "custom_jvp": _custom_jvp,
        "custom_vjp": _custom_vjp,
        "custom_vmap": _custom_vmap,
        "linear_call": _linear_call,
        "scan": scan,
        "shard_map": _shard_map,
        "while": while_loop,
    }
)
"""Kind of primitive (`xla_amp.jax.primitives.PrimitiveKind`) -> rule."""
