"""Static analyses of jaxprs: backward passes, gradient outputs, contracted arguments."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, Unpack

import numpy as np

from xla_amp.jax import compat
from xla_amp.jax.contraction_primitives import aten_product, sums_nothing
from xla_amp.jax.decisions import asked_precision, decide, dtype_of
from xla_amp.jax.primitives import info, name_of
from xla_amp.policy import Policy, beside_low

_T = TypeVar("_T")
_Rest = TypeVarTuple("_Rest")


def per_jaxpr(function: Callable[[Any, Unpack[_Rest]], _T]) -> Callable[[Any, Unpack[_Rest]], _T]:
    """`function` of a jaxpr and of what can be hashed; its results are kept as long as the jaxpr lives."""
    results: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _T]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def remembered(jaxpr: Any, *rest: *_Rest) -> _T:
        of_jaxpr = results.setdefault(jaxpr, {})
        if rest not in of_jaxpr:
            of_jaxpr[rest] = function(jaxpr, *rest)
        return of_jaxpr[rest]

    return remembered


@per_jaxpr
def has_backward(jaxpr: Any) -> bool:
    """Whether a jaxpr contains a backward pass."""
    return any(_is_backward(eqn) or any(map(has_backward, compat.sub_jaxprs(eqn.params))) for eqn in jaxpr.eqns)


def _is_backward(eqn: Any) -> bool:
    return any(map(compat.is_transpose_scope, compat.name_stack(eqn)))


def _is_differentiated(eqn: Any) -> bool:
    return any(map(compat.is_derivative_scope, compat.name_stack(eqn)))


def follows_gradients(jaxpr: Any, after: bool) -> frozenset[int]:
    """Numbers of the equations of a training step that belong to its optimizer.

    These depend on gradients and are not differentiated.  A network that runs after them is not counted: it reads a
    batch, which the differentiated part of the step reads and the step does not update, or a weight of whose shape no
    gradient makes a new value.  What it reads may also belong to the optimizer, a projection for example: then what
    follows is added to the old value of an argument, and returned.

    `after`: whether all of the program follows the gradients.
    """
    eqns = jaxpr.eqns
    differentiated = [_is_differentiated(eqn) for eqn in eqns]
    if after:
        return frozenset(index for index, inside in enumerate(differentiated) if not inside)
    sources = [
        _is_backward(eqn) or (not inside and any(map(has_backward, compat.sub_jaxprs(eqn.params))))
        for eqn, inside in zip(eqns, differentiated, strict=True)
    ]
    if not any(sources):
        return frozenset()
    spread = {var for eqn in eqns if info(eqn.primitive.name).axis_places for var in eqn.outvars}
    gradients: set[Any] = set()
    """What depends on a gradient."""
    for eqn, source in zip(eqns, sources, strict=True):
        if source or not gradients.isdisjoint(_variables(eqn)):
            gradients.update(eqn.outvars)
    given = {v for v in (*jaxpr.invars, *jaxpr.constvars) if any(n != 1 for n in getattr(v.aval, "shape", ()))}
    returned = gradients.intersection(compat.variables(jaxpr.outvars))
    """New values: what is returned, and what it is made of element by element."""
    others = {v for v in given if v.aval.shape not in {out.aval.shape for out in returned}}
    """What is updated nowhere, and what is computed from it."""
    updated: set[Any] = set()
    """Weights and the optimizer's state: they meet gradients in an equation whose result has their shape."""
    model: set[Any] = set()
    """What the differentiated part reads."""
    updates: set[Any] = set()
    """What depends on gradients, and is on the way to a new value of an argument."""
    for eqn, inside, source in zip(reversed(eqns), reversed(differentiated), reversed(sources), strict=True):
        variables = _variables(eqn)
        if inside or source:
            model.update(variables - gradients)
        elif gradients.isdisjoint(eqn.outvars):
            for found in (updated, model):
                if not found.isdisjoint(eqn.outvars):
                    found.update(variables)
        else:
            row, shapes = info(eqn.primitive.name), {getattr(var.aval, "shape", None) for var in eqn.outvars}
            alike = {v for v in variables if getattr(v.aval, "shape", None) in shapes and row.kind != "contraction"}
            updated.update(alike - gradients)
            if not returned.isdisjoint(eqn.outvars):
                returned.update(alike)
                if alike - gradients - spread:
                    updates.update(eqn.outvars)
            if not updates.isdisjoint(eqn.outvars):
                updates.update(variables & gradients)
    batch = {v for v in given if v in model and v not in updated}
    """The batch, and what is computed from it outside of the differentiated part."""
    numbers: set[int] = set()
    for index, (eqn, inside, source) in enumerate(zip(eqns, differentiated, sources, strict=True)):
        variables = _variables(eqn)
        if inside:
            continue
        if not others.isdisjoint(variables):
            others.update(eqn.outvars)
        if not batch.isdisjoint(variables):
            batch.update(eqn.outvars)
        elif (
            not source
            and not gradients.isdisjoint(variables)
            and (others.isdisjoint(variables) or not updates.isdisjoint(eqn.outvars))
        ):
            numbers.add(index)
    return frozenset(numbers)


@per_jaxpr
def near_one(jaxpr: Any) -> frozenset[int]:
    """Numbers of equations whose results are near 1, where a logarithm, a root or a divisor reads how near.

    In a low dtype ``1 - sigmoid(z)`` has lost all digits, or is 0.
    """
    kinds = list(map(_near_one, jaxpr.eqns))
    read: list[Any] = []
    made: dict[Any, tuple[int, beside_low.NearOne, set[Any]]] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        variables, each = _variables(eqn), kinds[index]
        kind: beside_low.NearOne = "ends" if "ends" in each else "made" if "made" in each else ""
        made.update(dict.fromkeys(eqn.outvars, (index, kind, variables)))
        read += variables if "read" in each else compat.variables(eqn.invars[1:]) if each == {"divided"} else ()
    return beside_low.near_one(read, made.get)


def _near_one(eqn: Any) -> frozenset[str]:
    row = info(eqn.primitive.name)
    if row.kind in ("call", "checkpoint", "custom_jvp"):
        return frozenset[str]().union(*map(_near_one_inside, compat.sub_jaxprs(eqn.params)))
    return frozenset({row.near_one if row.kind in (None, "clear", "data_movement", "conversion") else "ends"})


@per_jaxpr
def _near_one_inside(jaxpr: Any) -> frozenset[str]:
    return frozenset[str]().union(*map(_near_one, jaxpr.eqns))


def _variables(eqn: Any) -> set[Any]:
    return set(compat.variables(eqn.invars))


def gradient_outputs(jaxpr: Any, backward: bool, f32_outputs: Sequence[bool] | None) -> frozenset[Any]:
    """Variables through which a gradient leaves the backward pass, to the optimizer or to the caller.

    `backward`: whether all of the program belongs to a backward pass; `f32_outputs`: which of its results are such
    gradients, None for all.
    """
    inside = [backward or _is_backward(eqn) for eqn in jaxpr.eqns]
    if not any(inside):
        return frozenset()
    flags = [True] * len(jaxpr.outvars) if f32_outputs is None else f32_outputs
    found = set(compat.variables(itertools.compress(jaxpr.outvars, flags)))
    for eqn, is_inside in zip(reversed(jaxpr.eqns), reversed(inside), strict=True):
        if not is_inside or (info(eqn.primitive.name).passes_gradient and not found.isdisjoint(eqn.outvars)):
            found.update(_variables(eqn))
    computed = {var for eqn, is_inside in zip(jaxpr.eqns, inside, strict=True) if is_inside for var in eqn.outvars}
    return frozenset(found & computed)


def residual_outputs(jaxpr: Any) -> frozenset[Any]:
    """Results of sharded functions in a forward pass that only the backward pass reads."""
    sharded = [eqn for eqn in jaxpr.eqns if info(eqn.primitive.name).kind == "shard_map" and not _is_backward(eqn)]
    if not sharded:
        return frozenset()
    found = {var for eqn in sharded for var in eqn.outvars}
    found.difference_update(compat.variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        if not _is_backward(eqn):
            found.difference_update(_variables(eqn))
    return frozenset(found)


def runs_low(eqn: Any, policy: Policy) -> bool:
    """Whether the policy makes a primitive low, as far as its equation tells.

    A contraction that asks for a precision or sums nothing stays as it is.
    """
    primitive, params, avals = eqn.primitive, eqn.params, [atom.aval for atom in eqn.invars[:2]]
    if info(primitive.name).kind != "contraction":
        return decide(policy, name_of(eqn))[0].cast == "low"
    decision, _ = decide(policy, primitive.name, aten_product(primitive, params, *avals))
    summed = decision.from_user or not sums_nothing(primitive, params, *avals)
    return summed and decision.cast in ("low", "low_fp32_out") and not asked_precision(eqn)


@per_jaxpr
def contracted_arguments(jaxpr: Any, policy: Policy) -> tuple[bool, ...]:
    """For each argument of a jaxpr, whether a low-precision contraction reads it."""
    reads: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        kind = info(eqn.primitive.name).kind
        if kind == "contraction" and runs_low(eqn, policy):
            reads.update(compat.variables(eqn.invars[:2]))
        elif kind == "data_movement" and eqn.outvars[0] in reads:
            reads.update(compat.variables(eqn.invars[:1]))
        elif kind in ("call", "checkpoint"):
            (inner,) = compat.sub_jaxprs(eqn.params)
            reads.update(compat.variables(itertools.compress(eqn.invars, contracted_arguments(inner, policy))))
    return tuple(var in reads for var in jaxpr.invars)


@per_jaxpr
def selecting_outputs(jaxpr: Any) -> tuple[bool, ...]:
    """For each result of a jaxpr, whether its elements are 0 and 1, made from booleans inside."""
    made: set[Any] = set()
    for eqn in jaxpr.eqns:
        kind = info(eqn.primitive.name).kind
        from_booleans = kind == "conversion" and dtype_of(eqn.invars[0].aval) == np.bool_
        if from_booleans or (kind == "data_movement" and not made.isdisjoint(_variables(eqn))):
            made.update(eqn.outvars)
        elif kind == "call":
            (inner,) = compat.sub_jaxprs(eqn.params)
            made.update(var for var, flag in zip(eqn.outvars, selecting_outputs(inner), strict=True) if flag)
    return tuple(not isinstance(v, compat.Literal) and v in made for v in jaxpr.outvars)


@per_jaxpr
def residual_additions(jaxpr: Any) -> frozenset[Any]:
    """Results of additions ``x + f(x)`` of two arrays of one shape, where a contraction in ``f`` depends on ``x``."""
    sums = [index for index, eqn in enumerate(jaxpr.eqns) if info(eqn.primitive.name).adds and _of_one_shape(eqn)]
    found = set()
    for index in sums:
        first, second = jaxpr.eqns[index].invars
        before = jaxpr.eqns[:index]
        if second in _through_products(before, first) or first in _through_products(before, second):
            found.update(jaxpr.eqns[index].outvars)
    return frozenset(found)


def _of_one_shape(eqn: Any) -> bool:
    variables = [variable for variable in compat.variables(eqn.invars) if variable.aval.ndim]
    return len(variables) == 2 and variables[0].aval == variables[1].aval


def residual_carries(jaxpr: Any, first: int, count: int) -> tuple[bool, ...]:
    """For each carry of a loop's body, whether its next value depends on a contraction that depends on it.

    The carries are the arguments from `first` on, and the first results.
    """
    carries = zip(jaxpr.invars[first : first + count], jaxpr.outvars[:count], strict=True)
    return tuple(
        not isinstance(after, compat.Literal) and after in _through_products(jaxpr.eqns, before)
        for before, after in carries
    )


def _through_products(eqns: Sequence[Any], source: Any) -> set[Any]:
    """Variables that depend on a contraction that depends on `source`."""
    reached, found = {source}, set[Any]()
    for eqn in eqns:
        variables = _variables(eqn)
        if not found.isdisjoint(variables):
            found.update(eqn.outvars)
        elif not reached.isdisjoint(variables):
            (found if _contracts(eqn) else reached).update(eqn.outvars)
    return found


def _contracts(eqn: Any) -> bool:
    return info(eqn.primitive.name).kind == "contraction" or any(map(_has_product, compat.sub_jaxprs(eqn.params)))


@per_jaxpr
def _has_product(jaxpr: Any) -> bool:
    return any(map(_contracts, jaxpr.eqns))
