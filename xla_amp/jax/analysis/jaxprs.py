"""Static analyses of jaxprs: backward passes, gradient outputs, contracted arguments."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple, Unpack

import numpy as np

from xla_amp.jax import compat, rebind
from xla_amp.jax.decisions import asked_precision, decide, dtype_of, is_castable
from xla_amp.jax.low_primitives import described
from xla_amp.jax.primitives import PrimitiveInfo, info, name_of
from xla_amp.policy import Policy

_T = TypeVar("_T")
_Rest = TypeVarTuple("_Rest")


def per_jaxpr(function: Callable[[Any, Unpack[_Rest]], _T]) -> Callable[[Any, Unpack[_Rest]], _T]:
    """`function` of a jaxpr and of what can be hashed; its results are kept as long as the jaxpr lives."""
    results: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _T]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def remembered(jaxpr: Any, *rest: *_Rest) -> _T:
        of_jaxpr = results.setdefault(jaxpr, {})
        found = of_jaxpr.get(rest)
        if found is None:
            found = of_jaxpr[rest] = function(jaxpr, *rest)
        return found

    return remembered


class Node(NamedTuple):
    """An equation, and what the analyses ask of it."""

    eqn: Any
    row: PrimitiveInfo
    reads: frozenset[Any]
    """The variables that it reads."""
    floats: list[Any]
    """Its results that autocast may make low."""
    inside: list[Any]
    """The jaxprs that it contains."""
    decided: bool
    """Whether an inner region has decided it."""
    backward: bool
    """Whether it is part of a backward pass."""
    differentiated: bool
    """Whether it is part of a backward pass, or of the function that was differentiated."""


class Inside(NamedTuple):
    """The jaxprs in an equation, and how their values and its own follow from each other.

    A value that a loop carries is one with the loop's result, as the arguments of its functions hold it.
    """

    jaxprs: list[Any]
    """Of ``while``: the condition and the body."""
    holds: list[tuple[Any, Any]]
    """A value, and one that it may hold."""
    deciding: list[Any]
    """What decides which jaxpr makes the results, or how often it runs."""


def inside_of(eqn: Any) -> Inside:
    """The jaxprs in an equation that runs them; nothing for another."""
    kind, params, operands, outs = info(eqn.primitive.name).kind, eqn.params, eqn.invars, eqn.outvars
    start: Sequence[Any] = ()
    deciding: Sequence[Any] = ()
    given: list[tuple[Any, Sequence[Any]]] = []
    """A jaxpr, and what its arguments hold."""
    makers: list[Any] = []
    """The jaxprs that make the results."""
    if kind == "while":
        of_condition, of_body, start = rebind.looped(params, operands)
        condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        given = [(condition, [*of_condition, *outs]), (body, [*of_body, *outs])]
        makers, deciding = [body], condition.outvars
    elif kind == "scan":
        constants, start, scanned = rebind.scanned(params, operands)
        body = rebind.inner(params).jaxpr
        given, makers = [(body, [*constants, *outs[: len(start)], *scanned])], [body]
    elif kind == "cond":
        makers, deciding = [branch.jaxpr for branch in params["branches"]], operands[:1]
        given = [(branch, operands[1:]) for branch in makers]
    elif kind in rebind.KINDS:
        makers = [rebind.inner(params).jaxpr]
        given = [(makers[0], operands)]
    pairs = [*zip(outs, start, strict=False)]
    for jaxpr, values in given:
        pairs += zip(jaxpr.invars, values, strict=True)
    for jaxpr in makers:
        pairs += zip(outs, jaxpr.outvars, strict=True)
    holds = [(value, held) for value, held in pairs if not isinstance(held, compat.Literal)]
    return Inside([jaxpr for jaxpr, _ in given], holds, compat.variables(deciding))


_SCOPES: Final = (compat.is_region_scope, compat.is_transpose_scope, compat.is_derivative_scope)


@per_jaxpr
def nodes(jaxpr: Any) -> tuple[Node, ...]:
    """The equations of a jaxpr, which all analyses read."""
    marks: dict[int, list[bool]] = {}
    found = []
    for eqn in jaxpr.eqns:
        stack = compat.name_stack(eqn)
        mark = marks.get(id(stack))
        if mark is None:
            mark = marks[id(stack)] = [any(map(is_scope, stack)) for is_scope in _SCOPES]
        reads = frozenset(compat.variables(eqn.invars))
        floats = [var for var in eqn.outvars if is_castable(getattr(var.aval, "dtype", None))]
        found.append(Node(eqn, info(eqn.primitive.name), reads, floats, compat.sub_jaxprs(eqn.params), *mark))
    return tuple(found)


@per_jaxpr
def has_backward(jaxpr: Any) -> bool:
    """Whether a jaxpr contains a backward pass."""
    return any(node.backward or any(map(has_backward, node.inside)) for node in nodes(jaxpr))


def gradient_outputs(jaxpr: Any, backward: bool, f32_outputs: Sequence[bool] | None) -> frozenset[Any]:
    """Variables through which a gradient leaves the backward pass, to the optimizer or to the caller.

    `backward`: whether all of the program belongs to a backward pass; `f32_outputs`: which of its results are such
    gradients, None for all.
    """
    of_backward = [node for node in nodes(jaxpr) if backward or node.backward]
    if not of_backward:
        return frozenset()
    flags = [True] * len(jaxpr.outvars) if f32_outputs is None else f32_outputs
    found = set(compat.variables(itertools.compress(jaxpr.outvars, flags)))
    for node in reversed(nodes(jaxpr)):
        outside = not (backward or node.backward)
        if outside or (node.row.passes_gradient and not found.isdisjoint(node.eqn.outvars)):
            found |= node.reads
    return frozenset(found.intersection(var for node in of_backward for var in node.eqn.outvars))


@per_jaxpr
def residual_outputs(jaxpr: Any) -> frozenset[Any]:
    """Results of sharded functions in a forward pass that only the backward pass reads."""
    forward = [node for node in nodes(jaxpr) if not node.backward]
    found = {var for node in forward if node.row.kind == "shard_map" for var in node.eqn.outvars}
    if found:
        found.difference_update(compat.variables(jaxpr.outvars), *(node.reads for node in forward))
    return frozenset(found)


def runs_low(eqn: Any, policy: Policy) -> bool:
    """Whether the policy makes a primitive low, as far as its equation tells.

    A contraction that asks for a precision or sums at most four terms stays as it is.
    """
    primitive, params, avals = eqn.primitive, eqn.params, [atom.aval for atom in eqn.invars[:2]]
    if info(primitive.name).kind != "contraction":
        return decide(policy, name_of(eqn))[0].cast == "low"
    product = described(primitive, params, *avals)
    decision, _ = decide(policy, primitive.name, product.aten)
    summed = decision.from_user or not product.sums_few
    return summed and decision.cast in ("low", "low_fp32_out") and not asked_precision(eqn)


@per_jaxpr
def contracted_arguments(jaxpr: Any, policy: Policy) -> tuple[bool, ...]:
    """For each argument of a jaxpr, whether a low-precision contraction reads it."""
    reads: set[Any] = set()
    for node in reversed(nodes(jaxpr)):
        eqn, kind = node.eqn, node.row.kind
        if kind == "contraction" and runs_low(eqn, policy):
            reads.update(compat.variables(eqn.invars[:2]))
        elif kind == "data_movement" and eqn.outvars[0] in reads:
            reads.update(compat.variables(eqn.invars[:1]))
        elif kind in ("call", "checkpoint"):
            (inner,) = node.inside
            reads.update(compat.variables(itertools.compress(eqn.invars, contracted_arguments(inner, policy))))
    return tuple(var in reads for var in jaxpr.invars)


@per_jaxpr
def rounded_first(jaxpr: Any, policy: Policy) -> frozenset[Any]:
    """Results of primitives whose operand may be rounded instead, since only low-precision contractions read both."""
    found = [node.eqn for node in nodes(jaxpr) if node.row.rounded_first]
    only = _only_contracted(jaxpr, policy) if found else frozenset[Any]()
    return frozenset(eqn.outvars[0] for eqn in found if only.issuperset((*eqn.outvars, *eqn.invars)))


@per_jaxpr
def _only_contracted(jaxpr: Any, policy: Policy) -> frozenset[Any]:
    """The variables that only low-precision contractions read, also after their elements were moved or picked."""
    others = set(compat.variables(jaxpr.outvars))
    for node in reversed(nodes(jaxpr)):
        eqn, kind = node.eqn, node.row.kind
        if kind == "contraction" and runs_low(eqn, policy):
            others.update(compat.variables(eqn.invars[2:]))
        elif kind in ("call", "checkpoint"):
            (inner,) = node.inside
            flags = (var not in _only_contracted(inner, policy) for var in inner.invars)
            others.update(compat.variables(itertools.compress(eqn.invars, flags)))
        elif (
            not others.isdisjoint(eqn.outvars)
            or node.row.adds_devices
            or not (node.row.picks or kind == "data_movement")
        ):
            others |= node.reads
    made = {var for node in nodes(jaxpr) for var in node.eqn.outvars}
    return frozenset(made.union(jaxpr.invars) - others)


@per_jaxpr
def selecting_outputs(jaxpr: Any) -> tuple[bool, ...]:
    """For each result of a jaxpr, whether its elements are 0 and 1, made from booleans inside."""
    made: set[Any] = set()
    for node in nodes(jaxpr):
        eqn, kind = node.eqn, node.row.kind
        from_booleans = kind == "conversion" and dtype_of(eqn.invars[0].aval) == np.bool_
        if from_booleans or (kind == "data_movement" and not made.isdisjoint(node.reads)):
            made.update(eqn.outvars)
        elif kind == "call":
            made.update(itertools.compress(eqn.outvars, selecting_outputs(*node.inside)))
    return tuple(not isinstance(v, compat.Literal) and v in made for v in jaxpr.outvars)


@per_jaxpr
def residual_additions(jaxpr: Any) -> frozenset[Any]:
    """Results of additions ``x + f(x)`` of two arrays of one shape, where a contraction in ``f`` depends on ``x``."""
    found = set()
    for index, node in enumerate(nodes(jaxpr)):
        arrays = [each for each in compat.variables(node.eqn.invars) if node.row.adds and each.aval.ndim]
        if len(arrays) == 2 and arrays[0].aval == arrays[1].aval:
            (first, second), before = arrays, nodes(jaxpr)[:index]
            if second in _through_products(before, first) or first in _through_products(before, second):
                found.update(node.eqn.outvars)
    return frozenset(found)


def residual_carries(jaxpr: Any, first: int, count: int) -> tuple[bool, ...]:
    """For each carry of a loop's body, whether its next value depends on a contraction that depends on it.

    The carries are the arguments from `first` on, and the first results.
    """
    carries = zip(jaxpr.invars[first : first + count], jaxpr.outvars[:count], strict=True)
    return tuple(
        not isinstance(after, compat.Literal) and after in _through_products(nodes(jaxpr), before)
        for before, after in carries
    )


def _through_products(between: Sequence[Node], source: Any) -> set[Any]:
    """Variables that depend on a contraction that depends on `source`."""
    reached, found = {source}, set[Any]()
    for node in between:
        if not found.isdisjoint(node.reads):
            found.update(node.eqn.outvars)
        elif not reached.isdisjoint(node.reads):
            (found if _contracts(node) else reached).update(node.eqn.outvars)
    return found


def _contracts(node: Node) -> bool:
    return node.row.kind == "contraction" or any(map(_has_product, node.inside))


@per_jaxpr
def _has_product(jaxpr: Any) -> bool:
    return any(map(_contracts, nodes(jaxpr)))
