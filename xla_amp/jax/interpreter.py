"""The walker: applies the rules to one primitive after the other, for both drivers.

It knows no primitive by name; what it needs to know of them stands in `xla_amp.jax.primitives` and in the policy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from xla_amp import events
from xla_amp.jax import compat
from xla_amp.jax.contraction_primitives import contract_low
from xla_amp.jax.decisions import F32, Rules, banned, decide, dtype_of, is_float, note
from xla_amp.jax.higher_order import handlers
from xla_amp.jax.primitives import DTYPE_PARAMETER, FOLLOWS_BACK, TREATMENTS
from xla_amp.jax.value_info import Frame
from xla_amp.policy import Decision


class Walker:
    """Applies the rules of one region to the values of one program.

    Args:
        rules: what the region asks for.
        backward: whether the program belongs to a backward pass, where JAX's own differentiation has run before us.
    """

    def __init__(self, rules: Rules, *, backward: bool = False) -> None:
        self.rules = rules
        self.frame = Frame(rules)
        self.backward = backward

    def run(
        self,
        closed: compat.ClosedJaxpr,
        values: Sequence[Any],
        *,
        weights: Sequence[bool] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> list[Any]:
        """Runs a jaxpr under the rules; results have the dtypes that follow, not those of the jaxpr.

        Args:
            closed: the program.
            values: its arguments, in any floating dtype.
            weights: which of them come from outside; None for all.
            wanted: which results are wanted in float32 as they leave a contraction of a backward pass.
        """
        jaxpr = closed.jaxpr
        environment: dict[Any, Any] = dict(zip(jaxpr.invars, values, strict=True))
        environment.update(zip(jaxpr.constvars, closed.consts, strict=True))
        outside = zip(values, weights if weights is not None else [True] * len(values), strict=True)
        for value, weight in (*outside, *((const, True) for const in closed.consts)):
            if weight:
                self.frame.mark_weight(value)
        leaving = _leaving(jaxpr, self.backward, wanted)

        def read(atom: Any) -> Any:
            return _literal(atom) if isinstance(atom, compat.Literal) else environment[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            flags = [var in leaving for var in eqn.outvars]
            with compat.equation(eqn):
                outs = self.apply(eqn.primitive, operands, eqn.params, eqn=eqn, wanted=flags)
            environment.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def apply(
        self,
        primitive: Any,
        operands: list[Any],
        params: dict[str, Any],
        *,
        eqn: Any = None,
        wanted: Sequence[bool] = (),
    ) -> list[Any]:
        """One primitive under the rules: its results, as a list.

        Args:
            primitive: as JAX binds it.
            operands: values in any floating dtype.
            params: its parameters.
            eqn: where it stands in a jaxpr; None while a program runs.
            wanted: for each result, whether it is wanted in float32.
        """
        if eqn is not None and any(map(compat.is_region, compat.scopes(eqn))):
            return compat.bind(primitive, self.typed(operands, _avals(eqn)), params)
        policy = self.rules.now()
        decision, treatment = decide(policy, primitive.name)
        kind = treatment.kind if treatment else None
        if kind in handlers.HANDLERS:
            call = handlers.Call(primitive, operands, params, _avals(eqn), eqn, list(wanted), self)
            return handlers.HANDLERS[kind](call)
        if decision.cast == "ban":
            raise banned(primitive.name, decision)
        weak = [_is_weak(atom) for atom in (eqn.invars if eqn is not None else operands)]
        if kind == "contraction" and decision.cast == "low" and all(is_float(dtype_of(v)) for v in operands[:2]):
            used, outs = self._contract(primitive, operands, params, _avals(eqn) or operands, any(wanted))
        else:
            used, params = self._cast(primitive, kind, decision, operands, params, weak, eqn)
            outs = compat.bind(primitive, used, params)
            if kind in ("moves", "converts"):
                self.frame.moved(primitive, params, used, outs[0])
        if events.sinks:
            note(policy, primitive.name, decision, operands, used, outs, eqn)
        return outs

    def _contract(
        self, primitive: Any, operands: list[Any], params: dict[str, Any], text: Sequence[Any], wanted: bool
    ) -> tuple[list[Any], list[Any]]:
        low = self.rules.low
        masters = [value if self.frame.is_weight(value) else None for value in operands[:2]]
        used = [self.frame.low_copy(value) if dtype_of(value) != low else value for value in operands[:2]]
        # A float32 result of operands that the program itself has in a low dtype is the program's own wish.
        wish = params.get("preferred_element_type") == F32 and all(dtype_of(each) != F32 for each in text[:2])
        values = [*used, *operands[2:]]
        result = contract_low(
            primitive, values, (masters[0], masters[1]), params, low=low, out=F32 if wanted or wish else low
        )
        return values, [result]

    def _cast(
        self,
        primitive: Any,
        kind: str | None,
        decision: Decision,
        operands: list[Any],
        params: dict[str, Any],
        weak: Sequence[bool],
        eqn: Any,
    ) -> tuple[list[Any], dict[str, Any]]:
        if kind in ("typed", "kernel") or (kind is None and compat.sub_jaxprs(params)):
            return self.typed(operands, _avals(eqn)), params
        if kind in ("moves", "converts"):
            return operands, params
        if decision.cast == "low":
            used = [self.frame.cast(value, self.rules.low) for value in operands]
        elif decision.cast in ("fp32", "fp32_out", "fp32_append"):
            used = [self.frame.cast(value, F32) for value in operands]
        elif kind == "separate":
            used = operands
        else:
            used = self.frame.unified(operands, weak)
        name = DTYPE_PARAMETER.get(primitive.name)
        if name is not None and is_float(params.get(name)):
            params = {**params, name: next((dtype_of(v) for v in used if is_float(dtype_of(v))), params[name])}
        return used, params

    def typed(self, operands: Sequence[Any], avals: Sequence[Any] | None) -> list[Any]:
        """`operands` in the dtypes of the program text; as they are while a program runs."""
        if avals is None:
            return list(operands)
        pairs = zip(operands, avals, strict=True)
        return [self.frame.cast(v, aval.dtype) if is_float(dtype_of(aval)) else v for v, aval in pairs]


def _avals(eqn: Any) -> list[Any] | None:
    return None if eqn is None else [atom.aval for atom in eqn.invars]


def _literal(atom: Any) -> Any:
    value = atom.val
    dtype = dtype_of(atom.aval)
    if dtype is None or (dtype_of(value) is not None and not is_float(dtype)):
        return value
    return np.asarray(value, dtype)


def _is_weak(atom: Any) -> bool:
    if isinstance(atom, compat.Literal):
        return False  # judged by its value
    aval = getattr(atom, "aval", None)
    return bool(getattr(aval, "weak_type", False))


def _leaving(jaxpr: Any, backward: bool, wanted: Sequence[bool] | None) -> frozenset[Any]:
    """Variables through which a gradient leaves the backward pass: the optimizer, or the caller, gets them."""
    parts = [backward or any(map(compat.is_transpose, compat.scopes(eqn))) for eqn in jaxpr.eqns]
    if not any(parts):
        return frozenset()
    flags = [True] * len(jaxpr.outvars) if wanted is None else wanted
    found = {v for v, flag in zip(jaxpr.outvars, flags, strict=True) if flag and not isinstance(v, compat.Literal)}
    for eqn, inside in zip(reversed(jaxpr.eqns), reversed(parts), strict=True):
        if not inside or (_follows_back(eqn.primitive.name) and not found.isdisjoint(eqn.outvars)):
            found.update(atom for atom in eqn.invars if not isinstance(atom, compat.Literal))
    made = {var for eqn, inside in zip(jaxpr.eqns, parts, strict=True) if inside for var in eqn.outvars}
    return frozenset(found & made)


@functools.cache
def _follows_back(primitive: str) -> bool:
    row = TREATMENTS.get(primitive)
    return primitive in FOLLOWS_BACK or (row is not None and row.kind == "moves")


def has_kernels(jaxpr: Any) -> bool:
    """Whether a program contains a kernel that only its caller can ask for in another dtype."""
    return any(_kernel(eqn) or any(map(has_kernels, compat.sub_jaxprs(eqn.params))) for eqn in jaxpr.eqns)


def _kernel(eqn: Any) -> bool:
    row = TREATMENTS.get(eqn.primitive.name)
    floats = any(dtype_of(atom.aval) == F32 for atom in eqn.invars)
    return row is not None and row.kind == "kernel" and floats


def has_backward(jaxpr: Any) -> bool:
    """Whether a program contains a backward pass."""
    return any(
        any(map(compat.is_transpose, compat.scopes(eqn))) or any(map(has_backward, compat.sub_jaxprs(eqn.params)))
        for eqn in jaxpr.eqns
    )
