"""The equations of a training step that belong to its optimizer, by the tables `_SETS` and `_ADDITIONS`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from xla_amp.jax import compat
from xla_amp.jax.analysis.jaxprs import Node, has_backward, nodes, per_jaxpr

_SETS: Final = MappingProxyType(
    {
        "gradients": "What depends on a gradient.",
        "^returned": "New values: results that depend on gradients, and what they are made of element by element.",
        "others": "What is updated nowhere, as no new value has its shape, and what is computed from it.",
        "network": "What an activation makes of `others` and of a gradient, and what is computed from it.",
        "^updated": "Weights and state: they meet gradients in an equation whose result has their shape.",
        "^model": "What the differentiated part reads.",
        "^updates": "What depends on gradients, and is on the way to a new value of an argument.",
        "batch": "The batch, what is computed from it outside of the differentiated part, and what a network computes.",
    }
)
"""Set of variables -> what is in it.  Each is complete before the next; ``^``: it grows from the last equation up."""


class _Adds(NamedTuple):
    """Which equations add which of their variables to a set; several names of sets mean each of them."""

    to: str
    adds: Literal["makes", "reads", "alike"]
    of: Literal["every", "source", "outside", "layer", "model", "plain", "arguments", "results"]
    """`_Equation.parts`."""
    reads: tuple[str, ...] = ()
    """It reads a variable of these."""
    makes: tuple[str, ...] = ()
    """It makes a variable of these."""
    no: tuple[str, ...] = ()
    """It makes no variable of these."""
    beside: tuple[str, ...] = ()
    """A variable of `alike` is not in these."""
    within: tuple[str, ...] = ()
    """Variables of these are added."""
    without: tuple[str, ...] = ()
    """Variables of these are not added."""


_ADDITIONS: Final = (
    _Adds("gradients", "makes", "source"),
    _Adds("gradients", "makes", "every", reads=("gradients",)),
    _Adds("returned", "reads", "results", within=("gradients",)),
    _Adds("returned", "alike", "plain", makes=("gradients", "returned")),
    _Adds("others", "makes", "arguments", within=("of another shape",)),
    _Adds("others", "makes", "outside", reads=("others",)),
    _Adds("network", "makes", "layer", reads=("others", "gradients")),
    _Adds("network", "makes", "outside", reads=("others", "network")),
    _Adds("updated", "alike", "plain", makes=("gradients",), without=("gradients",)),
    _Adds("updated", "reads", "plain", makes=("updated",), no=("gradients",)),
    _Adds("model", "reads", "model", without=("gradients",)),
    _Adds("model", "reads", "plain", makes=("model",), no=("gradients",)),
    _Adds("updates", "makes", "plain", makes=("gradients", "returned"), beside=("gradients", "moved")),
    _Adds("updates", "reads", "plain", makes=("gradients", "updates"), no=("network",), within=("gradients",)),
    _Adds("batch", "makes", "arguments", within=("model",), without=("updated",)),
    _Adds("batch", "makes", "outside", reads=("batch",)),
    _Adds("batch", "makes", "outside", within=("network",)),
)


class _Equation(NamedTuple):
    parts: set[str]
    """``source``: of a backward pass, or contains one; ``outside``: not differentiated; ``layer``: outside, with an
    activation, which no optimizer has; ``model``: differentiated or a source; ``plain``: neither."""
    makes: set[Any]
    reads: frozenset[Any]
    alike: set[Any]
    """What it reads in the shape of a result; nothing of a product, which is no update."""


@per_jaxpr
def follows_gradients(jaxpr: Any, after: bool) -> frozenset[int]:
    """Numbers of the equations of a training step that belong to its optimizer.

    These depend on gradients and are not differentiated.  A network that runs after them is not counted: it reads a
    batch, which the differentiated part of the step reads and the step does not update, or a weight of whose shape no
    gradient makes a new value.  What it reads may also belong to the optimizer, a projection for example: then what
    follows is added to the old value of an argument, and returned.

    No value that an activation made of such a weight is on the way to a new one.

    `after`: whether all of the program follows the gradients.
    """
    given = nodes(jaxpr)
    if after:
        return frozenset(index for index, node in enumerate(given) if not node.differentiated)
    if not has_backward(jaxpr):
        return frozenset()
    found = [*map(_equation, given)]
    arguments = {v for v in (*jaxpr.invars, *jaxpr.constvars) if any(n != 1 for n in _shape(v) or ())}
    results = frozenset(compat.variables(jaxpr.outvars))
    ends = _Equation({"arguments"}, arguments, frozenset(), set()), _Equation({"results"}, set(), results, set())
    sets: dict[str, set[Any]] = {"moved": {v for node in given if node.row.axis_places for v in node.eqn.outvars}}
    for name in _SETS:
        up, name = name.startswith("^"), name.removeprefix("^")
        additions, sets[name] = [each for each in _ADDITIONS if each.to == name], set()
        for equation in (ends[1], *reversed(found), ends[0]) if up else (ends[0], *found, ends[1]):
            for addition in additions:
                if addition.of in equation.parts and _applies(addition, equation, sets):
                    added = getattr(equation, addition.adds)
                    for other in addition.within:
                        added = added & sets[other]
                    for other in addition.without:
                        added = added - sets[other]
                    sets[name] |= added
        if name == "gradients":
            new = {_shape(v) for v in results & sets[name]}
            sets["of another shape"] = {v for v in arguments if _shape(v) not in new}
    return frozenset(index for index, each in enumerate(found) if _is_counted(each, sets))


def _equation(node: Node) -> _Equation:
    makes = set(node.eqn.outvars)
    source = node.backward or (not node.differentiated and any(map(has_backward, node.inside)))
    model = node.differentiated or source
    parts = {"every", "model" if model else "plain"} | ({"source"} if source else set())
    if not node.differentiated:
        parts |= {"outside", "layer"} if _activates(node) else {"outside"}
    shapes = () if model or node.row.kind == "contraction" else {_shape(v) for v in makes}
    return _Equation(parts, makes, node.reads, {v for v in node.reads if _shape(v) in shapes})


def _shape(variable: Any) -> Any:
    return getattr(variable.aval, "shape", None)


def _applies(addition: _Adds, equation: _Equation, sets: dict[str, set[Any]]) -> bool:
    for name in addition.reads:
        if sets[name].isdisjoint(equation.reads):
            return False
    for name in addition.makes:
        if sets[name].isdisjoint(equation.makes):
            return False
    for name in addition.no:
        if not sets[name].isdisjoint(equation.makes):
            return False
    return not addition.beside or bool(equation.alike.difference(*(sets[name] for name in addition.beside)))


def _is_counted(equation: _Equation, sets: dict[str, set[Any]]) -> bool:
    reads, makes = equation.reads, equation.makes
    return (
        equation.parts >= {"outside", "plain"}
        and sets["batch"].isdisjoint(reads | makes)
        and not sets["gradients"].isdisjoint(reads)
        and (sets["others"].isdisjoint(reads) or not sets["updates"].isdisjoint(makes))
    )


def _activates(node: Node) -> bool:
    """Whether an equation is a layer's nonlinearity, which no optimizer has."""
    if node.row.kind in ("call", "checkpoint"):
        return any(map(_any_activates, node.inside))
    return node.row.kind == "custom_jvp" or node.row.activates


@per_jaxpr
def _any_activates(jaxpr: Any) -> bool:
    return any(map(_activates, nodes(jaxpr)))
