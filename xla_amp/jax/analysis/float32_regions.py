"""Float32 regions: operations that a rule computes in float32 from low values, and what follows from them.

JAX's linearization would save their float32 intermediate values for the backward pass: five for a ``gelu``, where a
program that computes in bfloat16 saves as many in half the bytes.  The interpreter evaluates a region inside
`jax.checkpoint`, so its low operands are saved instead, and the backward pass computes the rest again, in float32.
Only operations that cost little more than reading their operands belong to a region.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from xla_amp.jax import compat
from xla_amp.jax.analysis.jaxprs import Node, has_backward, nodes, per_jaxpr, rounded_first
from xla_amp.jax.decisions import F32, LOW, decide, dtype_of, is_castable
from xla_amp.jax.primitives import info, name_of
from xla_amp.jax.value_info import cast
from xla_amp.policy import Policy, effects, op_catalog
from xla_amp.policy.effects import Remembered


class Float32Region(NamedTuple):
    """Equations of a jaxpr that are evaluated together."""

    members: tuple[int, ...]
    """Numbers of the equations, ascending."""
    reads: tuple[Any, ...]
    """Variables and constant arrays that enter."""
    leaving: tuple[Any, ...]
    """Variables that are read outside."""
    length: int
    """How many equations in a row it was found in."""


class Candidates(NamedTuple):
    """Where regions may be in a jaxpr."""

    stops: dict[int, int]
    """Number of each equation that a region may start with -> where the cheap equations after it end."""
    shared: dict[int, frozenset[Any]]
    """Number of each of them that rounds nothing -> those of its operands whose gradients are added up."""
    readers: dict[Any, set[int]]
    """Variable -> numbers of the equations that read it; -1 for the caller."""
    computing: dict[Any, set[int]]
    """Variable -> numbers of the equations that compute from it and pass a gradient that JAX has still to add up."""


@per_jaxpr
def candidates(jaxpr: Any, policy: Policy) -> Candidates:
    """Where regions may be under a policy; empty if nowhere."""
    given, results = nodes(jaxpr), frozenset(compat.variables(jaxpr.outvars))
    stops: dict[int, int] = {}
    shared: dict[int, frozenset[Any]] = {}
    stop, widening, later = len(jaxpr.eqns), False, set[Any]()
    """Of the cheap equations in a row: where they end, whether one is float32, and what gradients pass."""
    passing = set[Any]() if has_backward(jaxpr) else {*results}
    """Values with gradients that JAX has still to add up."""
    computing: dict[Any, set[int]] = collections.defaultdict(set)
    for index, node in reversed(list(enumerate(given))):
        passes = not (node.row.stops_gradient or passing.isdisjoint(node.floats))
        passing |= node.reads if passes else frozenset()
        for variable in node.reads if passes and node.row.kind is None else ():
            computing[variable].add(index)
        rounds_first = node.row.rounded_first and node.eqn.outvars[0] in rounded_first(jaxpr, policy)
        if rounds_first or not _is_cheap(node):
            stop, widening, later = index, False, set()
            continue
        if _widens(node, policy):
            stops[index], widening = stop, True
        elif passes and widening and (again := node.reads if _adds_gradients(node) else node.reads & later):
            stops[index], shared[index] = stop, again
        later |= node.reads if passes else frozenset()
    readers: dict[Any, set[int]] = {}
    if stops:
        for number, read in enumerate((results, *[node.reads for node in given]), -1):
            for variable in read:
                readers.setdefault(variable, set()).add(number)
    return Candidates(stops, shared, readers, computing)


def _is_cheap(node: Node) -> bool:
    if node.decided:
        return False
    if node.row.kind == "conversion":  # of an integer: the others say what a product may do
        return bool(np.issubdtype(node.eqn.invars[0].aval.dtype, np.integer))
    if node.row.indexed_by:  # a float32 gradient of an array of which few elements are read would be large
        return reads_again(node.eqn)
    if node.row.kind in _CALLS:
        return all(map(_all_cheap, node.inside))
    return _is_cheap_primitive(node.eqn.primitive.name)


@per_jaxpr
def _all_cheap(jaxpr: Any) -> bool:
    return all(map(_is_cheap, nodes(jaxpr)))


def reads_again(eqn: Any) -> bool:
    """Whether an equation that indexes an array may return an element several times."""
    indices = eqn.params[info(eqn.primitive.name).indexed_by]
    shape, batch = eqn.invars[1].aval.shape, indices.start_indices_batching_dims
    return any(size != 1 for axis, size in enumerate(shape[:-1]) if axis not in batch)


def _adds_gradients(node: Node) -> bool:
    """Whether the derivative of an equation adds up gradients of one element."""
    if node.row.kind in _CALLS:
        return any(map(_any_adds_gradients, node.inside))
    return bool(node.row.indexed_by) and reads_again(node.eqn)


@per_jaxpr
def _any_adds_gradients(jaxpr: Any) -> bool:
    read = [variable for node in nodes(jaxpr) for variable in node.reads]
    return len(read) > len(set(read)) or any(map(_adds_gradients, nodes(jaxpr)))


_CALLS: Final = ("call", "custom_jvp")


@functools.cache
def _is_cheap_primitive(name: str) -> bool:
    row, aten = info(name), op_catalog.equivalent("jaxpr", name)
    if row.cheap is not None or row.kind is not None or aten is None:
        return bool(row.cheap)
    computed = op_catalog.operation_class(aten) in ("activation", "comparison", "elementwise", "transcendental")
    return computed or name.startswith("reduce_")


def _widens(node: Node, policy: Policy) -> bool:
    """Whether an equation, or one in it, is computed in float32 from values that may be low."""
    if node.row.kind in _CALLS:
        return any(_any_widens(jaxpr, policy) for jaxpr in node.inside)
    operands = node.eqn.invars
    reads_number = any(map(_is_number, operands))
    if reads_number and any(_is_power_of_two(operands[index]) for index in node.row.scaled_by):
        return False
    return bool(node.floats) and not node.row.exact and _widens_primitive(name_of(node.eqn), policy, reads_number)


@per_jaxpr
def _any_widens(jaxpr: Any, policy: Policy) -> bool:
    return any(_widens(node, policy) for node in nodes(jaxpr))


@functools.lru_cache(maxsize=4096)
def _widens_primitive(name: str, policy: Policy, reads_number: bool) -> bool:
    decision = decide(policy, name)[0]
    if decision.rule is None and decision.operation in op_catalog.catalogue().may_be_low:
        return reads_number
    return decision.cast == "fp32" and _is_cheap_primitive(name)


def find(
    equations: Sequence[Node], readers: dict[Any, set[int]], numbers: Sequence[int], low: Sequence[Any]
) -> Float32Region:
    """The region that starts with the first of some equations.

    `numbers` are of equations in a row, all cheap and none evaluated; `low` are the low variables that the first reads.
    """
    inside = set(low)
    members: list[int] = []
    for number in numbers:
        node = equations[number]
        if not inside.isdisjoint(node.reads):
            members.append(number)
            inside.update(node.eqn.outvars)
    chosen = set(members)
    made = [var for number in members for var in equations[number].eqn.outvars]
    reads = {name(atom): atom for number in members for atom in equations[number].eqn.invars if not _is_number(atom)}
    for var in made:
        reads.pop(var, None)
    leaving = tuple(v for v in made if not readers.get(v, chosen) <= chosen)
    return Float32Region(tuple(members), tuple(reads.values()), leaving, len(numbers))


def adds_gradients(equations: Sequence[Node], places: Candidates, region: Float32Region, low: Sequence[Any]) -> bool:
    """Whether a region that starts with a fork adds up gradients of a low value, and computes float32 from it."""
    first, *later = region.members
    read = frozenset[Any]().union(*(equations[number].reads for number in later))
    again = _adds_gradients(equations[first]) or not places.shared[first].isdisjoint(read.intersection(low))
    return again and any(number in places.stops and number not in places.shared for number in later)


def structure(eqns: Sequence[Any], region: Float32Region) -> tuple[Any, ...]:
    """What regions with the same computation have in common; `eqns` are those of the region."""
    number = {name(atom): index for index, atom in enumerate(region.reads)}
    rows = []
    for eqn in eqns:
        atoms = [(constant_key(atom.val), atom.aval) if _is_number(atom) else number[name(atom)] for atom in eqn.invars]
        rows.append((eqn.primitive, tuple(eqn.params.items()), *atoms))
        for var in eqn.outvars:
            number[var] = len(number)
    return (*rows, *map(number.__getitem__, region.leaving))


def constant_key(value: Any) -> Any:
    """What equal constants have in common."""
    content = np.asarray(value)
    return content.dtype, content.shape, content.tobytes()


_functions: collections.OrderedDict[Any, Remembered[Callable[..., Any]]] = collections.OrderedDict()
_MOST_FUNCTIONS: Final = 1024


def function(
    key: Any,
    evaluate: Callable[..., list[Any]],
    written: Callable[..., list[Any]] | None,
    avals: Sequence[Any],
    shared: Sequence[int] = (),
) -> Callable[..., list[Any]]:
    """A function that computes a region and keeps its arguments for the backward pass instead of what it computes.

    It is traced once for all regions with the same computation, and is one function of the program that JAX lowers.
    If the program computed all of the region in float32, its results have the dtypes of `evaluate`, and the gradients
    of a low argument are added up before they are rounded.

    `key`: what the computation depends on; one that cannot be hashed is not remembered.  `evaluate` computes the region
    by the policy, `written` as it was written; None if the program itself has low values there.
    `shared`: indices of low arguments whose float32 copies follow, which get their gradients.
    """
    try:
        hash(key)
    except TypeError:
        return _make(evaluate, written, avals, shared)
    made = effects.remembered(_functions, key, lambda: _make(evaluate, written, avals, shared))
    if len(_functions) > _MOST_FUNCTIONS:
        _functions.popitem(last=False)
    return made


def _make(
    evaluate: Callable[..., list[Any]],
    written: Callable[..., list[Any]] | None,
    avals: Sequence[Any],
    shared: Sequence[int],
) -> Callable[..., list[Any]]:
    with effects.collect() as followed:
        traced = compat.trace(evaluate, avals)
    wide = None
    if written is not None and not followed.uses and (shared or _computes_low(traced.jaxpr)):
        dtypes = [aval.dtype for aval in traced.out_avals]
        wide_avals = [compat.with_dtype(aval, F32) if aval.dtype in LOW else aval for aval in avals]
        wide = compat.trace(lambda *values: list(map(cast, written(*values), dtypes)), wide_avals)

    chosen = traced if wide is None else wide

    def float32_region(*arguments: Any) -> list[Any]:
        dtypes = [aval.dtype for aval in chosen.in_avals]
        return list(jaxpr_as_fun(chosen)(*map(cast, arguments, dtypes)))

    # XLA sees both computations, and may keep a value after all where that is faster; a loop saves the arguments.
    region = jax.jit(jax.checkpoint(float32_region, prevent_cse=False))
    if not shared:
        return region
    if wide is None:
        return lambda *arguments: region(*arguments[: len(avals)])
    return _with_shared(region, jaxpr_as_fun(wide), len(avals), shared)


def _with_shared(
    region: Callable[..., list[Any]], wide: Callable[..., Sequence[Any]], count: int, shared: Sequence[int]
) -> Callable[..., list[Any]]:
    """`region` with a float32 copy of each argument at the indices `shared` after its `count` arguments.

    The copies get the gradients of these arguments, in float32, and are not saved.  `wide` computes the region from
    float32 arguments.
    """

    @jax.custom_jvp
    def evaluated(*arguments: Any) -> list[Any]:
        return region(*arguments[:count])

    def derivative(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        given, moving = primals[:count], list(tangents[:count])
        for index, tangent in zip(shared, tangents[count:], strict=True):
            moving[index] = tangent
        changing = [index for index, tangent in enumerate(moving) if not compat.is_zero(tangent)]

        def linear(given: Any, moving: Any) -> list[Any]:
            arguments = [cast(each, F32) for each in given]

            def of(*changed: Any) -> list[Any]:
                at = dict(zip(changing, changed, strict=True))
                return list(filter(is_floating, wide(*(at.get(i, each) for i, each in enumerate(arguments)))))

            moving = [cast(each, F32) for each in moving]
            return list(jax.jvp(of, [arguments[index] for index in changing], moving)[1])

        outs = region(*given)
        rest = iter(jax.jit(jax.checkpoint(linear, prevent_cse=False))(given, [moving[index] for index in changing]))
        return outs, [next(rest) if is_floating(out) else np.zeros(out.shape, jax.dtypes.float0) for out in outs]

    def is_floating(value: Any) -> bool:
        return bool(np.issubdtype(value.dtype, np.inexact)) or is_castable(value.dtype)

    evaluated.defjvp(derivative, symbolic_zeros=True)
    return evaluated


def _computes_low(jaxpr: Any) -> bool:
    """Whether more than a conversion reads a low argument: its gradients would be added up in the low dtype."""
    low = {var for var in jaxpr.invars if dtype_of(var.aval) in LOW}
    return any(node.row.kind != "conversion" and not low.isdisjoint(node.reads) for node in nodes(jaxpr))


def is_float32(eqns: Sequence[Any]) -> bool:
    """Whether the equations of a region were written with no low value."""
    return LOW.isdisjoint([atom.aval.dtype for eqn in eqns for atom in (*eqn.invars, *eqn.outvars)])


def _is_number(atom: Any) -> bool:
    return isinstance(atom, compat.Literal) and np.ndim(atom.val) == 0


def _is_power_of_two(atom: Any) -> bool:
    is_real = _is_number(atom) and np.isrealobj(atom.val)
    return is_real and bool(np.abs(np.frexp(np.float64(atom.val))[0]) == 0.5)


def name(atom: Any) -> Any:
    """A key for a variable or a constant of a jaxpr."""
    return id(atom.val) if isinstance(atom, compat.Literal) else atom
