"""Rules for higher-order primitives: re-trace each sub-jaxpr under autocast and bind the primitive again.

So names, shardings, donation, checkpoint policies and all later transformations remain those of JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax

from xla_amp.jax import compat
from xla_amp.jax.contraction_primitives import original_call
from xla_amp.jax.decisions import F32, dtype_of, is_castable
from xla_amp.jax.higher_order.common import avals_of, retrace
from xla_amp.jax.higher_order.loops import scan, while_loop
from xla_amp.jax.interpreter import HigherOrderCall, HigherOrderRules
from xla_amp.jax.jaxpr_analysis import contracted_arguments


def _call(call: HigherOrderCall) -> list[Any]:
    name = "jaxpr" if "jaxpr" in call.params else "call_jaxpr"
    closed = call.params[name]
    f32_outputs = tuple(call.f32_outputs) if call.f32_outputs else None
    copied, copies = _low_copies(call, closed.jaxpr)
    traced = retrace(call, closed, call.operands, call.weight_flags(), copied=copied, f32_outputs=f32_outputs)
    params = {**call.params, name: traced}
    for setting, value in compat.per_operand_params().items():
        if setting in params:
            params[setting] = (*params[setting], *(value for _ in copies))
    return compat.bind(call.primitive, [*call.operands, *copies], params)


def _low_copies(call: HigherOrderCall, jaxpr: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Indices of weights that a jaxpr contracts and whose low copy exists outside of it, and these copies."""
    table = call.interpreter.table
    used = contracted_arguments(jaxpr, call.interpreter.settings.current_policy())
    indices = [
        i for i, value in enumerate(call.operands) if used[i] and call.is_weight(i) and table.has_low_copy(value)
    ]
    return tuple(indices), [table.low_copy(call.operands[index]) for index in indices]


def _checkpoint(call: HigherOrderCall) -> list[Any]:
    closed = compat.ClosedJaxpr(call.params["jaxpr"], ())
    f32_outputs = tuple(call.f32_outputs) if call.f32_outputs else None
    copied, copies = _low_copies(call, closed.jaxpr)
    traced = retrace(call, closed, call.operands, call.weight_flags(), copied=copied, f32_outputs=f32_outputs)
    policy = _checkpoint_policy(call.params["policy"])
    params = {**call.params, "jaxpr": compat.without_constants(traced), "policy": policy}
    return compat.bind(call.primitive, [*traced.consts, *call.operands, *copies], params)


@functools.lru_cache(maxsize=256)
def _checkpoint_policy(policy: Any) -> Any:
    """A checkpoint policy that sees JAX's contraction primitives instead of our own."""
    if policy is None:
        return None

    def saveable(primitive: Any, *avals: Any, **params: Any) -> Any:
        primitive, shown, settings = original_call(primitive, avals, params)
        return policy(primitive, *shown, **settings)

    return saveable


def _cond(call: HigherOrderCall) -> list[Any]:
    branches: Sequence[compat.ClosedJaxpr] = call.params["branches"]
    index, *operands = call.operands
    avals = avals_of(operands)
    weights = call.weight_flags()[1:]
    traced = [retrace(call, branch, operands, weights) for branch in branches]
    results = [functools.reduce(_wider, types) for types in zip(*(t.out_avals for t in traced), strict=True)]
    consts = [const for branch in traced for const in branch.consts]
    new = []
    for number, branch in enumerate(traced):
        start = sum(len(other.consts) for other in traced[:number])

        def run(*values: Any, branch: Any = branch, start: int = start) -> list[Any]:
            own = values[start : start + len(branch.consts)]
            outs = compat.eval_jaxpr(compat.ClosedJaxpr(branch.jaxpr, own), values[len(consts) :])
            return list(map(call.cast, outs, [aval.dtype for aval in results]))

        same = not consts and all(a.dtype == b.dtype for a, b in zip(branch.out_avals, results, strict=True))
        new.append(branch if same else compat.trace(run, (*avals_of(consts), *avals), branch.jaxpr.debug_info))
    return compat.bind(call.primitive, [index, *consts, *operands], {**call.params, "branches": tuple(new)})


def _wider(one: Any, other: Any) -> Any:
    if one.dtype == other.dtype or not is_castable(one.dtype):
        return one
    return compat.with_dtype(one, F32)


def _custom_jvp(call: HigherOrderCall) -> list[Any]:
    closed: compat.ClosedJaxpr = call.params["call_jaxpr"]
    traced = retrace(call, closed, call.operands, call.weight_flags())
    rule = compat.custom_jvp_rule(call.params, call.primitive)
    avals = [atom.aval for atom in closed.jaxpr.invars]

    @jax.custom_jvp
    def function(*values: Any) -> list[Any]:
        return compat.eval_jaxpr(traced, values)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        rule_jaxpr = compat.trace(rule, (*avals, *map(compat.tangent_aval, avals)), closed.jaxpr.debug_info)
        weights = [True] * len(avals) + [False] * len(avals)
        outs = call.inner_interpreter().eval_jaxpr(rule_jaxpr, (*primals, *tangents), weights=weights)
        half = len(outs) // 2
        dtypes = [aval.dtype for aval in traced.out_avals]
        return list(map(call.cast, outs[:half], dtypes)), list(map(call.cast, outs[half:], dtypes))

    function.defjvp(derivative)
    return list(function(*call.operands))


def _custom_vjp(call: HigherOrderCall) -> list[Any]:
    closed: compat.ClosedJaxpr = call.params["call_jaxpr"]
    avals = [atom.aval for atom in closed.jaxpr.invars]
    forward, backward, residual_layout = compat.custom_vjp_rules(call.params, call.primitive)
    results = [aval.dtype for aval in closed.out_avals]

    def interpret(rule: Callable[..., Sequence[Any]], values: Sequence[Any], *, backward: bool = False) -> list[Any]:
        rule_jaxpr = compat.trace(rule, avals_of(values), closed.jaxpr.debug_info)
        outs = call.inner_interpreter(backward=backward).eval_jaxpr(rule_jaxpr, values)
        return list(map(call.cast, outs, [aval.dtype for aval in rule_jaxpr.out_avals]))

    @jax.custom_vjp
    def function(*values: Any) -> list[Any]:
        return list(map(call.cast, call.inner_interpreter().eval_jaxpr(closed, values), results))

    def fwd(*values: Any) -> tuple[list[Any], list[Any]]:
        outs = interpret(functools.partial(_with_perturbed_flags, forward, call.params["num_consts"]), values)
        count, forwarded = residual_layout()
        residuals = iter(outs[:count])
        return outs[count:], [next(residuals) if index is None else values[index] for index in forwarded]

    def bwd(residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
        zeros: list[bool] = []

        def nonzero(*values: Any) -> list[Any]:
            outs = backward(*values)
            zeros[:] = [compat.is_zero(out) or dtype_of(out) == jax.dtypes.float0 for out in outs]
            return [out for out, zero in zip(outs, zeros, strict=True) if not zero]

        outs = iter(interpret(nonzero, [*residuals, *cotangents], backward=True))
        gradients, logs = backward.split([None if zero else next(outs) for zero in zeros])
        return tuple(
            g if g is None else call.cast(g, aval.dtype) for g, aval in zip(gradients, avals, strict=True)
        ), logs

    compat.defvjp(function, fwd, bwd)
    return list(function(*call.interpreter.cast_to_avals(call.operands, avals)))


def _with_perturbed_flags(forward: Callable[..., Sequence[Any]], constants: int, *values: Any) -> Sequence[Any]:
    """Calls `forward` with each value followed by whether it is differentiated: closed-over constants are not."""
    return forward(*(item for index, value in enumerate(values) for item in (value, index >= constants)))


def _shard_map(call: HigherOrderCall) -> list[Any]:
    params = call.params
    jaxpr = params["jaxpr"]
    weights = call.weight_flags()

    def shard(*values: Any) -> tuple[Any, ...]:
        closed = compat.ClosedJaxpr(jaxpr, ())
        return tuple(call.inner_interpreter().eval_jaxpr(closed, values, weights=weights))

    axes = params["newly_manual_axes"]
    mapped = jax.shard_map(
        shard,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(axes) if axes else set(),
    )
    return list(mapped(*call.operands))


HIGHER_ORDER_RULES: Final[HigherOrderRules] = MappingProxyType(
    {
        "call": _call,
        "checkpoint": _checkpoint,
        "cond": _cond,
        "custom_jvp": _custom_jvp,
        "custom_vjp": _custom_vjp,
        "scan": scan,
        "shard_map": _shard_map,
        "while": while_loop,
    }
)
"""Kind of primitive (`xla_amp.jax.primitives.Kind`) -> rule."""
