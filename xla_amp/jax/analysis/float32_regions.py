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
from xla_amp.jax.analysis.jaxprs import Node, nodes, per_jaxpr
from xla_amp.jax.decisions import decide
from xla_amp.jax.primitives import info, name_of
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
    readers: dict[Any, set[int]]
    """Variable -> numbers of the equations that read it; -1 for the caller."""


@per_jaxpr
def candidates(jaxpr: Any, policy: Policy) -> Candidates:
    """Where regions may be under a policy; empty if nowhere."""
    stops: dict[int, int] = {}
    stop = len(jaxpr.eqns)
    for index, node in reversed(list(enumerate(nodes(jaxpr)))):
        if not _is_cheap(node):
            stop = index
        elif _widens(node, policy):
            stops[index] = stop
    readers: dict[Any, set[int]] = {}
    if stops:
        of_caller = frozenset(compat.variables(jaxpr.outvars))
        for number, read in [(-1, of_caller), *((n, node.reads) for n, node in enumerate(nodes(jaxpr)))]:
            for variable in read:
                readers.setdefault(variable, set()).add(number)
    return Candidates(stops, readers)


def _is_cheap(node: Node) -> bool:
    if node.decided:
        return False
    return all(map(_all_cheap, node.inside)) if _is_call(node) else _is_cheap_primitive(node.eqn.primitive.name)


@per_jaxpr
def _all_cheap(jaxpr: Any) -> bool:
    return all(map(_is_cheap, nodes(jaxpr)))


def _is_call(node: Node) -> bool:
    return node.row.kind in ("call", "custom_jvp")


@functools.cache
def _is_cheap_primitive(name: str) -> bool:
    row, aten = info(name), op_catalog.equivalent("jaxpr", name)
    if row.cheap is not None or row.kind not in (None, "clear") or aten is None:
        return bool(row.cheap)
    computed = op_catalog.operation_class(aten) in ("activation", "comparison", "elementwise", "transcendental")
    return computed or name.startswith("reduce_")


def _widens(node: Node, policy: Policy) -> bool:
    """Whether an equation, or one in it, is computed in float32 from values that may be low."""
    if _is_call(node):
        return any(_any_widens(jaxpr, policy) for jaxpr in node.inside)
    numbers = [index for index, atom in enumerate(node.eqn.invars) if _is_number(atom)]
    if any(index in node.row.scaled_by and _is_power_of_two(node.eqn.invars[index].val) for index in numbers):
        return False
    return not node.row.exact and _widens_primitive(name_of(node.eqn), policy, bool(numbers))


@per_jaxpr
def _any_widens(jaxpr: Any, policy: Policy) -> bool:
    return any(_widens(node, policy) for node in nodes(jaxpr))


@functools.lru_cache(maxsize=4096)
def _widens_primitive(name: str, policy: Policy, reads_number: bool) -> bool:
    decision = decide(policy, name)[0]
    if decision.rule is None and decision.operation in op_catalog.catalogue().may_be_low:
        return reads_number
    return decision.cast == "fp32" and _is_cheap_primitive(name)


def find(jaxpr: Any, readers: dict[Any, set[int]], numbers: Sequence[int], low: Sequence[Any]) -> Float32Region:
    """The region that starts with the first of some equations.

    `numbers` are of equations in a row, all cheap and none evaluated; `low` are the low variables that the first reads.
    """
    inside = set(low)
    members: list[int] = []
    equations = nodes(jaxpr)
    for number in numbers:
        node = equations[number]
        if not inside.isdisjoint(node.reads):
            members.append(number)
            inside.update(node.eqn.outvars)
    chosen = set(members)
    made = [var for number in members for var in jaxpr.eqns[number].outvars]
    reads = {name(atom): atom for number in members for atom in jaxpr.eqns[number].invars if not _is_number(atom)}
    for var in made:
        reads.pop(var, None)
    leaving = tuple(v for v in made if not readers.get(v, chosen) <= chosen)
    return Float32Region(tuple(members), tuple(reads.values()), leaving, len(numbers))


def structure(jaxpr: Any, region: Float32Region) -> tuple[Any, ...]:
    """What regions with the same computation have in common."""
    number = {name(atom): index for index, atom in enumerate(region.reads)}
    rows = []
    for member in region.members:
        eqn = jaxpr.eqns[member]
        atoms = tuple(
            (constant_key(atom.val), atom.aval) if _is_number(atom) else number[name(atom)] for atom in eqn.invars
        )
        rows.append((eqn.primitive, tuple(eqn.params.items()), atoms))
        number.update((var, len(number)) for var in eqn.outvars)
    return (*rows, tuple(number[var] for var in region.leaving))


def constant_key(value: Any) -> Any:
    """What equal constants have in common."""
    content = np.asarray(value)
    return content.dtype, content.shape, content.tobytes()


_functions: collections.OrderedDict[Any, Remembered[Callable[..., Any]]] = collections.OrderedDict()
_MOST_FUNCTIONS: Final = 1024


def function(key: Any, evaluate: Callable[..., list[Any]], avals: Sequence[Any]) -> Callable[..., list[Any]]:
    """A function that computes a region and keeps its arguments for the backward pass instead of what it computes.

    It is traced once for all regions with the same computation, and is one function of the program that JAX lowers.

    `key`: what the computation depends on; one that cannot be hashed is not remembered.
    """
    try:
        hash(key)
    except TypeError:
        return _make(evaluate, avals)
    made = effects.remembered(_functions, key, lambda: _make(evaluate, avals))
    if len(_functions) > _MOST_FUNCTIONS:
        _functions.popitem(last=False)
    return made


def _make(evaluate: Callable[..., list[Any]], avals: Sequence[Any]) -> Callable[..., list[Any]]:
    traced = compat.trace(evaluate, avals)

    def float32_region(*arguments: Any) -> list[Any]:
        return list(jaxpr_as_fun(traced)(*arguments))

    # XLA sees both computations, and may keep a value after all where that is faster; a loop saves the arguments.
    return jax.jit(jax.checkpoint(float32_region, prevent_cse=False))


def _is_number(atom: Any) -> bool:
    return isinstance(atom, compat.Literal) and np.ndim(atom.val) == 0


def _is_power_of_two(number: Any) -> bool:
    return bool(np.abs(np.frexp(np.float64(number))[0]) == 0.5) if np.isrealobj(number) else False


def name(atom: Any) -> Any:
    """A key for a variable or a constant of a jaxpr."""
    return id(atom.val) if isinstance(atom, compat.Literal) else atom
