"""Primitives that contain programs: each program is walked and the primitive is bound again with what came out.

So names, shardings, donation, checkpoint policies and every later transformation stay JAX's own.  Loops keep the dtypes
of what they carry (or take the low dtype, where the region asks for it and the body gives it); a float32 weight that a
loop contracts is rounded once, before it.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax

from xla_amp import record
from xla_amp.jax import compat
from xla_amp.jax.contraction import base_call, low_copy
from xla_amp.jax.frame import magnitude
from xla_amp.jax.rules import F32, decide, dtype_of, is_float
from xla_amp.policy import Policy


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One primitive with programs inside, as a handler gets it."""

    primitive: Any
    operands: list[Any]
    params: dict[str, Any]
    avals: list[Any] | None
    """Types of the operands in the program text; None while a program runs."""
    eqn: Any
    wanted: list[bool]
    walker: Any

    def walk(self) -> Any:
        """A walker for a program inside."""
        from xla_amp.jax.walk import Walker

        inside = self.eqn is not None and any(map(compat.is_transpose, compat.scopes(self.eqn)))
        return Walker(self.walker.rules, backward=self.walker.backward or inside)

    def is_weight(self, place: int) -> bool:
        """Whether an operand comes from outside."""
        return bool(self.walker.frame.is_weight(self.operands[place]))

    def flags(self) -> tuple[bool, ...]:
        """`is_weight` of all operands."""
        return tuple(self.is_weight(place) for place in range(len(self.operands)))

    def cast(self, value: Any, dtype: Any) -> Any:
        """`value` in `dtype`, where casts apply to both."""
        return self.walker.frame.cast(value, dtype) if is_float(dtype) else value


_Cache = weakref.WeakKeyDictionary[Any, dict[Any, compat.ClosedJaxpr]]
_walked: _Cache = weakref.WeakKeyDictionary()
"""Program -> what it was walked under -> the result, so that a function that is called again is traced and compiled
once."""


def _retrace(
    call: Call,
    closed: compat.ClosedJaxpr,
    values: Sequence[Any],
    weights: tuple[bool, ...],
    *,
    fixed: bool = True,
    copied: tuple[int, ...] = (),
    **options: Any,
) -> compat.ClosedJaxpr:
    """A program walked for arguments of the types of `values`.

    Args:
        call: the primitive that contains it.
        closed: the program.
        values: its arguments.
        weights: which of them come from outside.
        fixed: whether what is a number in the text around it is one inside as well.
        copied: places of arguments whose low copies follow as further arguments.
        **options: for `Walker.run`.
    """
    low = call.walker.rules.low
    avals = [*_types(values), *(compat.with_dtype(compat.typeof(values[place]), low) for place in copied)]
    walker = call.walk()
    scalars = {place: value for place, value in enumerate(values) if fixed and magnitude(value) is not None}
    known_scalars = tuple((place, str(value.dtype), float(value)) for place, value in scalars.items())
    asked = (walker.rules, walker.rules.now(), walker.backward)
    key = (*asked, tuple(avals), weights, known_scalars, copied, tuple(options.items()))
    cache = _walked.setdefault(closed.jaxpr, {})
    known = cache.get(key) if not closed.consts else None
    if known is None or record.sinks:

        def walked(*arguments: Any) -> list[Any]:
            inside = [scalars.get(place, argument) for place, argument in enumerate(arguments[: len(values)])]
            for place, copy in zip(copied, arguments[len(values) :], strict=True):
                walker.frame.give_low(inside[place], copy)
            return walker.run(closed, inside, weights=weights, **options)

        known = compat.trace(walked, avals, closed.jaxpr.debug_info)
        if not closed.consts:
            cache[key] = known
    return known


def _types(values: Sequence[Any]) -> list[Any]:
    return [compat.typeof(value) for value in values]


def _call(call: Call) -> list[Any]:
    name = "jaxpr" if "jaxpr" in call.params else "call_jaxpr"
    closed = call.params[name]
    wanted = tuple(call.wanted) if call.wanted else None
    copied, copies = _copies(call, closed.jaxpr)
    walked = _retrace(call, closed, call.operands, call.flags(), copied=copied, wanted=wanted)
    params = {**call.params, name: walked}
    for setting, value in compat.per_operand().items():
        if setting in params:
            params[setting] = (*params[setting], *(value for _ in copies))
    return compat.bind(call.primitive, [*call.operands, *copies], params)


def _copies(call: Call, jaxpr: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Places of weights that a program contracts and of which a low copy exists outside of it, and the copies."""
    frame = call.walker.frame
    used = _contracted(jaxpr, call.walker.rules.now())
    places = [i for i, value in enumerate(call.operands) if used[i] and call.is_weight(i) and frame.has_low(value)]
    return tuple(places), [frame.low_copy(call.operands[place]) for place in places]


def _checkpoint(call: Call) -> list[Any]:
    closed = compat.ClosedJaxpr(call.params["jaxpr"], ())
    wanted = tuple(call.wanted) if call.wanted else None
    copied, copies = _copies(call, closed.jaxpr)
    walked = _retrace(call, closed, call.operands, call.flags(), copied=copied, wanted=wanted)
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


def _scan(call: Call) -> list[Any]:
    params = call.params
    constants, carried = params["num_consts"], params["num_consts"] + params["num_carry"]
    closed: compat.ClosedJaxpr = params["jaxpr"]
    steps = [compat.slice_aval(compat.typeof(x), params["length"]) for x in call.operands[carried:]]
    consts, copies, places = _hoisted(call, call.operands[:constants], closed.jaxpr)
    weights = (*(dtype_of(c) == F32 for c in consts), *(False,) * params["num_carry"], *call.flags()[carried:])
    results = closed.jaxpr.outvars[params["num_carry"] :]
    wanted = (*(True,) * params["num_carry"], *(call.wanted[params["num_carry"] :] or (False,) * len(results)))

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
        lambda types: compat.trace(body(types), (*_types([*consts, *copies]), *types, *steps), closed.jaxpr.debug_info),
        lambda values, types: _free_results(call, closed, [*consts], copies, places, weights, values, steps),
    )
    new = {**params, "jaxpr": traced, "num_consts": constants + len(copies)}
    if traced.consts:
        new["jaxpr"] = compat.ClosedJaxpr(compat.without_constants(traced), ())
        new["num_consts"] += len(traced.consts)
    operands = [*traced.consts, *consts, *copies, *start, *call.operands[carried:]]
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

    outs = compat.trace(walked, (*_types(consts), *carried, *steps), closed.jaxpr.debug_info).out_avals
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
    used = _contracted(jaxpr, policy)
    places = [i for i, const in enumerate(consts) if dtype_of(const) == F32 and used[i]]
    low = call.walker.rules.low
    copies = []
    for place in places:
        value = consts[place]
        known = call.walker.frame.has_low(value) and call.walker.frame.is_weight(value)
        copies.append(call.walker.frame.low_copy(value) if known else low_copy(value, low))
    return list(consts), copies, places


_contractions: weakref.WeakKeyDictionary[Any, dict[Policy, tuple[bool, ...]]] = weakref.WeakKeyDictionary()


def _contracted(jaxpr: Any, policy: Policy) -> tuple[bool, ...]:
    """For each argument of a program, whether a low contraction reads it."""
    cache = _contractions.setdefault(jaxpr, {})
    if policy not in cache:
        reads: set[Any] = set()
        for eqn in reversed(jaxpr.eqns):
            decision, treatment = decide(policy, eqn.primitive.name)
            kind = treatment.kind if treatment else None
            if kind == "contraction" and decision.cast == "low":
                reads.update(atom for atom in eqn.invars[:2] if not isinstance(atom, compat.Literal))
            elif kind == "moves" and eqn.outvars[0] in reads and not isinstance(eqn.invars[0], compat.Literal):
                reads.add(eqn.invars[0])
            elif kind in ("call", "checkpoint"):
                (inner,) = compat.sub_jaxprs(eqn.params)
                flags = zip(eqn.invars, _contracted(inner, policy), strict=True)
                reads.update(atom for atom, flag in flags if flag and not isinstance(atom, compat.Literal))
        cache[policy] = tuple(var in reads for var in jaxpr.invars)
    return cache[policy]


def _while(call: Call) -> list[Any]:
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
        lambda types: compat.trace(walked(types), (*_types([*consts, *copies]), *types), body.jaxpr.debug_info),
        lambda types, _: _free_results(call, body, consts, copies, places, weights, types, ()),
    )
    asks = [*call.operands[:split], *values]
    tested = _retrace(call, test, asks, (False,) * len(asks), fixed=False)
    new = {**params, "cond_jaxpr": _closed(tested), "body_jaxpr": _closed(traced)}
    new["cond_nconsts"] = split + len(tested.consts)
    new["body_nconsts"] = len(consts) + len(copies) + len(traced.consts)
    operands = [*tested.consts, *call.operands[:split], *traced.consts, *consts, *copies, *values]
    return compat.bind(call.primitive, operands, new)


def _closed(traced: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    return compat.ClosedJaxpr(compat.without_constants(traced), ()) if traced.consts else traced


def _cond(call: Call) -> list[Any]:
    branches: Sequence[compat.ClosedJaxpr] = call.params["branches"]
    index, *operands = call.operands
    avals = _types(operands)
    weights = call.flags()[1:]
    walked = [_retrace(call, branch, operands, weights) for branch in branches]
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
        new.append(branch if same else compat.trace(run, (*_types(consts), *avals), branch.jaxpr.debug_info))
    return compat.bind(call.primitive, [index, *consts, *operands], {**call.params, "branches": tuple(new)})


def _wider(one: Any, other: Any) -> Any:
    if one.dtype == other.dtype or not is_float(one.dtype):
        return one
    return compat.with_dtype(one, F32)


def _custom_jvp(call: Call) -> list[Any]:
    closed: compat.ClosedJaxpr = call.params["call_jaxpr"]
    traced = _retrace(call, closed, call.operands, call.flags())
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
        text = compat.trace(function, _types(values), closed.jaxpr.debug_info)
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

    def bwd(kept: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        zeros: list[bool] = []

        def rule(*values: Any) -> list[Any]:
            outs = backward(*values)
            zeros[:] = [compat.is_zero(out) or dtype_of(out) == jax.dtypes.float0 for out in outs]
            return [out for out, zero in zip(outs, zeros, strict=True) if not zero]

        outs = iter(walk(rule, [*kept, *cotangents], back=True))
        return tuple(
            None if zero else call.cast(next(outs), aval.dtype) for zero, aval in zip(zeros, avals, strict=True)
        )

    function.defvjp(fwd, bwd)
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
        "scan": _scan,
        "shard_map": _shard_map,
        "while": _while,
    }
)
"""Kind of a row in `xla_amp.jax.treatments.TREATMENTS` -> what is done with it."""
