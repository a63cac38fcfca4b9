"""Primitives that contain programs: each program is walked and the primitive is bound again with what came out.

So names, shardings, donation, checkpoint policies and every later transformation stay JAX's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax

from xla_amp.jax import compat
from xla_amp.jax.contraction_primitives import base_call
from xla_amp.jax.decisions import F32, dtype_of, is_float
from xla_amp.jax.higher_order.common import Call, contracted, retrace, types_of
from xla_amp.jax.higher_order.loops import scan, while_loop


def _call(call: Call) -> list[Any]:
    name = "jaxpr" if "jaxpr" in call.params else "call_jaxpr"
    closed = call.params[name]
    wanted = tuple(call.wanted) if call.wanted else None
    copied, copies = _copies(call, closed.jaxpr)
    walked = retrace(call, closed, call.operands, call.flags(), copied=copied, wanted=wanted)
    params = {**call.params, name: walked}
    for setting, value in compat.per_operand().items():
        if setting in params:
            params[setting] = (*params[setting], *(value for _ in copies))
    return compat.bind(call.primitive, [*call.operands, *copies], params)


def _copies(call: Call, jaxpr: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Places of weights that a program contracts and of which a low copy exists outside of it, and the copies."""
    frame = call.walker.frame
    used = contracted(jaxpr, call.walker.rules.now())
    places = [i for i, value in enumerate(call.operands) if used[i] and call.is_weight(i) and frame.has_low(value)]
    return tuple(places), [frame.low_copy(call.operands[place]) for place in places]


def _checkpoint(call: Call) -> list[Any]:
    closed = compat.ClosedJaxpr(call.params["jaxpr"], ())
    wanted = tuple(call.wanted) if call.wanted else None
    copied, copies = _copies(call, closed.jaxpr)
    walked = retrace(call, closed, call.operands, call.flags(), copied=copied, wanted=wanted)
    params = {**call.params, "jaxpr": compat.without_constants(walked), "policy": _policy(call.params["policy"])}
    return compat.bind(call.primitive, [*walked.consts, *call.operands, *copies], params)


@functools.lru_cache(maxsize=256)
def _policy(policy: Any) -> Any:
    """A checkpoint policy that is asked about JAX's contraction where ours stands."""
    if policy is None:
        return None

    def saveable(primitive: Any, *avals: Any, **params: Any) -> Any:
        primitive, shown, settings = base_call(primitive, avals, params)
        return policy(primitive, *shown, **settings)

    return saveable


def _cond(call: Call) -> list[Any]:
    branches: Sequence[compat.ClosedJaxpr] = call.params["branches"]
    index, *operands = call.operands
    avals = types_of(operands)
    weights = call.flags()[1:]
    walked = [retrace(call, branch, operands, weights) for branch in branches]
    common = [functools.reduce(_wider, types) for types in zip(*(w.out_avals for w in walked), strict=True)]
    consts = [const for branch in walked for const in branch.consts]
    new = []
    for place, branch in enumerate(walked):
        before = sum(len(other.consts) for other in walked[:place])

        def run(*values: Any, branch: Any = branch, before: int = before) -> list[Any]:
            own = values[before : before + len(branch.consts)]
            outs = compat.evaluate(compat.ClosedJaxpr(branch.jaxpr, own), values[len(consts) :])
            return list(map(call.cast, outs, [t.dtype for t in common]))

        same = not consts and all(a.dtype == b.dtype for a, b in zip(branch.out_avals, common, strict=True))
        new.append(branch if same else compat.trace(run, (*types_of(consts), *avals), branch.jaxpr.debug_info))
    return compat.bind(call.primitive, [index, *consts, *operands], {**call.params, "branches": tuple(new)})


def _wider(one: Any, other: Any) -> Any:
    if one.dtype == other.dtype or not is_float(one.dtype):
        return one
    return compat.with_dtype(one, F32)


def _custom_jvp(call: Call) -> list[Any]:
    closed: compat.ClosedJaxpr = call.params["call_jaxpr"]
    traced = retrace(call, closed, call.operands, call.flags())
    rule = compat.custom_jvp_rule(call.params, call.primitive)
    avals = [atom.aval for atom in closed.jaxpr.invars]

    @jax.custom_jvp
    def function(*values: Any) -> list[Any]:
        return compat.evaluate(traced, values)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        text = compat.trace(rule, (*avals, *map(compat.typeof_tangent, avals)), closed.jaxpr.debug_info)
        flags = [True] * len(avals) + [False] * len(avals)
        outs = call.walk().run(text, (*primals, *tangents), weights=flags)
        half = len(outs) // 2
        types = [aval.dtype for aval in traced.out_avals]
        return list(map(call.cast, outs[:half], types)), list(map(call.cast, outs[half:], types))

    function.defjvp(derivative)
    return list(function(*call.operands))


def _custom_vjp(call: Call) -> list[Any]:
    closed: compat.ClosedJaxpr = call.params["call_jaxpr"]
    avals = [atom.aval for atom in closed.jaxpr.invars]
    forward, backward, residuals = compat.custom_vjp_rules(call.params, call.primitive)
    results = [aval.dtype for aval in closed.out_avals]

    def walk(function: Callable[..., Sequence[Any]], values: Sequence[Any], *, back: bool = False) -> list[Any]:
        text = compat.trace(function, types_of(values), closed.jaxpr.debug_info)
        walker = call.walk()
        walker.backward = walker.backward or back
        outs = walker.run(text, values)
        return list(map(call.cast, outs, [aval.dtype for aval in text.out_avals]))

    @jax.custom_vjp
    def function(*values: Any) -> list[Any]:
        return list(map(call.cast, call.walk().run(closed, values), results))

    def fwd(*values: Any) -> tuple[list[Any], list[Any]]:
        flat = functools.partial(_with_flags, forward, call.params["num_consts"])
        outs = walk(flat, values)
        count, forwarded = residuals()
        kept = iter(outs[:count])
        return outs[count:], [next(kept) if place is None else values[place] for place in forwarded]

    def bwd(kept: Sequence[Any], cotangents: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
        zeros: list[bool] = []

        def nonzero(*values: Any) -> list[Any]:
            outs = backward(*values)
            zeros[:] = [compat.is_zero(out) or dtype_of(out) == jax.dtypes.float0 for out in outs]
            return [out for out, zero in zip(outs, zeros, strict=True) if not zero]

        outs = iter(walk(nonzero, [*kept, *cotangents], back=True))
        gradients, logs = backward.split([None if zero else next(outs) for zero in zeros])
        return tuple(
            g if g is None else call.cast(g, aval.dtype) for g, aval in zip(gradients, avals, strict=True)
        ), logs

    compat.defvjp(function, fwd, bwd)
    return list(function(*call.walker.typed(call.operands, avals)))


def _with_flags(forward: Callable[..., Sequence[Any]], constants: int, *values: Any) -> Sequence[Any]:
    """`forward` on its values, each with whether it is differentiated: what the function closes over is not."""
    return forward(*(item for place, value in enumerate(values) for item in (value, place >= constants)))


def _shard_map(call: Call) -> list[Any]:
    params = call.params
    jaxpr = params["jaxpr"]
    weights = call.flags()

    def part(*values: Any) -> tuple[Any, ...]:
        return tuple(call.walk().run(compat.ClosedJaxpr(jaxpr, ()), values, weights=weights))

    axes = params["newly_manual_axes"]
    mapped = jax.shard_map(
        part,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(axes) if axes else set(),
    )
    return list(mapped(*call.operands))


HANDLERS: Final[Mapping[str | None, Callable[[Call], list[Any]]]] = MappingProxyType(
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
"""Kind of a row in `xla_amp.jax.primitives.TREATMENTS` -> what is done with it."""
