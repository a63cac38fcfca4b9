"""Evaluate jaxprs equation by equation, and bind primitives that contain jaxprs again, with other jaxprs inside.

`bind` is the only code that knows how the parameters and the operands of such a primitive follow from its jaxprs.  A
new jaxpr may take further operands and return further results:

===================  ============================  ====================================
kind                 further operands              further results
===================  ============================  ====================================
call, checkpoint     after the others              after the others
cond                 after the others              after the others, of every branch
scan                 after its constants           after the others, stacked
while                after the body's constants    further carried values
===================  ============================  ====================================

The constants of the new jaxprs become operands where the primitive has no other place for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import jax

from xla_amp.jax import compat
from xla_amp.jax.primitives import info

_T = TypeVar("_T")

_ONE: Final = ("jaxpr", "call_jaxpr", "call", "callee")
"""Parameters that hold the jaxpr of a primitive with one."""


def run(
    eqns: Iterable[Any],
    environment: dict[Any, Any],
    process: Callable[[Any, list[Any]], Sequence[Any]],
    read: Callable[[dict[Any, Any], Any], Any] | None = None,
) -> None:
    """Adds the results of equations to `environment`.

    Args:
        eqns: in order.
        environment: variable -> value.
        process: an equation and its operands to its results; runs in the context of the equation.
        read: the value of a variable or constant in an environment.
    """
    read = read or value_of
    for eqn in eqns:
        operands = [read(environment, atom) for atom in eqn.invars]
        with compat.equation_context(eqn):
            outs = process(eqn, operands)
        environment.update(zip(eqn.outvars, outs, strict=True))


def value_of(environment: Mapping[Any, Any], atom: Any) -> Any:
    """The value of a variable or constant."""
    return atom.val if isinstance(atom, compat.Literal) else environment[atom]


def evaluate(inner: Any, values: Sequence[Any], process: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """The results of a jaxpr; each value is dropped after its last use.

    Args:
        inner: the jaxpr, with its constants or without any.
        values: its arguments.
        process: as for `run`.
    """
    jaxpr, consts = closed(inner).jaxpr, closed(inner).consts
    environment: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
    for eqn, last in zip(jaxpr.eqns, _last_reads(jaxpr), strict=True):
        run((eqn,), environment, process)
        for variable in last:
            del environment[variable]
    return [value_of(environment, atom) for atom in jaxpr.outvars]


def _last_reads(jaxpr: compat.Jaxpr) -> list[set[Any]]:
    """For each equation the variables that it is the last to read."""
    read = {atom for atom in jaxpr.outvars if not isinstance(atom, compat.Literal)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        found.append({atom for atom in eqn.invars if not isinstance(atom, compat.Literal)} - read)
        read |= found[-1]
    return found[::-1]


def bind_as_written(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Binds the primitive of an equation with other operands of the same types."""
    return compat.bind(eqn.primitive, operands, eqn.params)


def closed(jaxpr: Any) -> compat.ClosedJaxpr:
    """`jaxpr` with its constants, of which one without a place for them has none."""
    return jaxpr if isinstance(jaxpr, compat.ClosedJaxpr) else compat.ClosedJaxpr(jaxpr, ())


def inner(params: Mapping[str, Any]) -> compat.ClosedJaxpr:
    """The jaxpr of a primitive that contains one."""
    return closed(params[_place(params)])


def _place(params: Mapping[str, Any]) -> str:
    return next(name for name in _ONE if name in params)


def scanned(params: Mapping[str, Any], operands: Sequence[_T]) -> tuple[list[_T], list[_T], list[_T]]:
    """Among the operands of ``scan``: the constants, the initial carry, and the arrays that are scanned."""
    constants, carried = compat.scan_counts(params)
    return _split(operands, constants, carried)


def looped(params: Mapping[str, Any], operands: Sequence[_T]) -> tuple[list[_T], list[_T], list[_T]]:
    """Among the operands of ``while``: the constants of the condition, those of the body, and the initial carry."""
    return _split(operands, params["cond_nconsts"], params["body_nconsts"])


def _split(operands: Sequence[_T], first: int, second: int) -> tuple[list[_T], list[_T], list[_T]]:
    rest = first + second
    return list(operands[:first]), list(operands[first:rest]), list(operands[rest:])


def bind(
    eqn: Any, operands: Sequence[Any], jaxprs: Sequence[compat.ClosedJaxpr], extra_results: int = 0, **changed: Any
) -> list[Any]:
    """Binds the primitive of an equation with other jaxprs inside.

    Args:
        eqn: the equation.
        operands: of the new primitive, in the order of the equation's; see above for further ones.
        jaxprs: the new ones: the body; of ``while`` the condition and the body; of ``cond`` the branches, whose results
            have equal types.
        extra_results: how many results the new primitive has besides those of the equation.
        **changed: other parameters.
    """
    rule: _Rule = _RULES.get(info(eqn.primitive.name).kind, _call)
    operands, params = rule(eqn, list(operands), jaxprs, extra_results)
    return compat.bind(eqn.primitive, operands, {**eqn.params, **params, **changed})


_New: TypeAlias = tuple[list[Any], dict[str, Any]]
"""Operands and the parameters that change."""
_Rule: TypeAlias = Callable[[Any, list[Any], Sequence[compat.ClosedJaxpr], int], _New]


def _call(eqn: Any, operands: list[Any], jaxprs: Sequence[compat.ClosedJaxpr], extra_results: int) -> _New:
    (new,) = jaxprs
    name = _place(eqn.params)
    takes_constants = isinstance(eqn.params[name], compat.ClosedJaxpr)
    consts = [] if takes_constants and all(map(compat.is_concrete, new.consts)) else new.consts
    if consts:
        new = _with_constants_as_arguments(new)
    params: dict[str, Any] = {name: new if takes_constants else compat.without_constants(new)}
    further = len(operands) - len(eqn.invars)
    for setting, value in compat.per_operand_params().items():
        if setting in eqn.params:
            params[setting] = (*[value] * len(consts), *eqn.params[setting], *[value] * further)
    for setting, value in compat.per_result_params().items():
        if setting in eqn.params:
            params[setting] = (*eqn.params[setting], *[value] * extra_results)
    return [*consts, *operands], params


def _scan(eqn: Any, operands: list[Any], jaxprs: Sequence[compat.ClosedJaxpr], extra_results: int) -> _New:
    (body,) = jaxprs
    constants = compat.scan_counts(eqn.params)[0] + len(operands) - len(eqn.invars) + len(body.consts)
    return [*body.consts, *operands], compat.scan_params(eqn.params, _with_constants_as_arguments(body), constants)


def _while(eqn: Any, operands: list[Any], jaxprs: Sequence[compat.ClosedJaxpr], extra_results: int) -> _New:
    condition, body = jaxprs
    first_body, first_carry = eqn.params["cond_nconsts"], len(operands) - len(eqn.outvars) - extra_results
    params = {
        "cond_jaxpr": _with_constants_as_arguments(condition),
        "cond_nconsts": len(condition.consts) + first_body,
        "body_jaxpr": _with_constants_as_arguments(body),
        "body_nconsts": len(body.consts) + first_carry - first_body,
    }
    return [*condition.consts, *operands[:first_body], *body.consts, *operands[first_body:]], params


def _cond(eqn: Any, operands: list[Any], jaxprs: Sequence[compat.ClosedJaxpr], extra_results: int) -> _New:
    index, *rest = operands
    consts = [const for branch in jaxprs for const in branch.consts]
    branches, start = [], 0
    for branch in jaxprs:
        branches.append(_with_all_constants(branch, start, consts, rest) if consts else branch)
        start += len(branch.consts)
    return [index, *consts, *rest], {"branches": tuple(branches)}


def _with_all_constants(
    branch: compat.ClosedJaxpr, start: int, consts: Sequence[Any], operands: Sequence[Any]
) -> compat.ClosedJaxpr:
    """A branch that takes the constants of all branches first, of which those after `start` are its own."""

    def run_branch(*values: Any) -> list[Any]:
        own = values[start : start + len(branch.consts)]
        return compat.eval_jaxpr(compat.ClosedJaxpr(branch.jaxpr, own), values[len(consts) :])

    return compat.trace(run_branch, [compat.typeof(value) for value in (*consts, *operands)], branch.jaxpr.debug_info)


_RULES: Final[Mapping[str | None, _Rule]] = MappingProxyType({"cond": _cond, "scan": _scan, "while": _while})
"""`PrimitiveKind` of `xla_amp.jax.primitives` -> operands and parameters with other jaxprs; `_call` for one jaxpr
that takes all operands."""


def _with_constants_as_arguments(traced: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    return compat.ClosedJaxpr(compat.without_constants(traced), ()) if traced.consts else traced


def custom_functions(eqn: Any) -> tuple[Any, ...]:
    """The function of ``custom_jvp_call`` or ``custom_vjp_call``, and the rules of its derivative."""
    return tuple(eqn.primitive.get_bind_params(eqn.params)["subfuns"])


def bind_custom(eqn: Any, operands: Sequence[Any], *functions: Callable[..., Any]) -> list[Any]:
    """Binds ``custom_jvp_call`` or ``custom_vjp_call`` with other functions, of flat values to flat values."""
    params = dict(eqn.primitive.get_bind_params(eqn.params))
    wrapped = tuple(map(compat.wrap_function, functions, params.pop("subfuns")))
    return list(eqn.primitive.bind(*operands, subfuns=wrapped, **params))


def shard_map(
    params: Mapping[str, Any], function: Callable[..., Any], operands: Sequence[Any], more: Any = None
) -> Any:
    """Binds ``shard_map`` with another function of one device's values.

    Args:
        params: of the equation.
        function: returns a tuple of the results; with `more` a pair of that and further results.
        operands: of the equation.
        more: how the further results are put together, as ``out_specs`` of `jax.shard_map`.
    """
    axes, out_specs = params["newly_manual_axes"], tuple(params["out_specs"])
    mapped = jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=out_specs if more is None else (out_specs, more),
        check_vma=params["check_vma"],
        axis_names=set(axes) if axes else set(),
    )
    return mapped(*operands)
