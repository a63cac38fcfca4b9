"""Evaluate jaxprs equation by equation; bind primitives that contain jaxprs again.

The table at the end knows how the parameters, operands and results of such a primitive follow from what is inside.
What is inside may take further operands and return further results:

===================  ============================  ====================================
kind                 further operands              further results
===================  ============================  ====================================
call, checkpoint     after the others              after the others
cond                 after the others              after the others, of every branch
scan                 after its constants           after the others, stacked
while                after the body's constants    further carried values
shard_map            none                          after the others, stacked by devices
===================  ============================  ====================================

The constants of the new jaxprs become operands where the primitive has no other place for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final, TypeVar

import jax
from jax.extend.linear_util import wrap_init
from jax.sharding import PartitionSpec

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
    context: Callable[[Any], AbstractContextManager[None]] = compat.equation_context,
) -> None:
    """Adds the results of equations to `environment`.

    `process` makes results of an equation and its operands, inside `context`; `read` gives the value of a variable or
    constant in an environment.
    """
    read = read or value_of
    for eqn in eqns:
        operands = [read(environment, atom) for atom in eqn.invars]
        with context(eqn):
            outs = process(eqn, operands)
        environment.update(zip(eqn.outvars, outs, strict=True))


def value_of(environment: Mapping[Any, Any], atom: Any) -> Any:
    """The value of a variable or constant."""
    return atom.val if isinstance(atom, compat.Literal) else environment[atom]


def evaluate(inner: Any, values: Sequence[Any], process: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """The results of a jaxpr; each value is dropped after its last use.

    `inner` has its constants, or none; `process` is as for `run`.
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
    read = set(compat.variables(jaxpr.outvars))
    found = []
    for eqn in reversed(jaxpr.eqns):
        found.append(set(compat.variables(eqn.invars)) - read)
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


def bind(eqn: Any, operands: Sequence[Any], insides: Sequence[Any], further: int = 0, **changed: Any) -> list[Any]:
    """Binds the primitive of an equation again.

    Args:
        operands: of the new primitive, in the order of the equation's; see above for further ones.
        insides: the new jaxprs: the body; of ``while`` the condition and the body; of ``cond`` the branches, whose
            results have equal types.  Where JAX traces again, functions of flat values to flat values: the body of
            ``shard_map``, for one device's values; of a custom derivative the function and its rules.
        further: how many results the new primitive has besides those of the equation; not for ``shard_map``.
        changed: other parameters.
    """
    if info(eqn.primitive.name).kind == "shard_map":
        return sharded(eqn.params, operands, *insides)
    if info(eqn.primitive.name).kind in ("custom_jvp", "custom_vjp"):
        return _bind_custom(eqn, operands, insides)
    given, params = _FORMS[info(eqn.primitive.name).kind](eqn, list(operands), insides, further)
    return compat.bind(eqn.primitive, given, {**eqn.params, **params, **changed})


def _call(eqn: Any, operands: list[Any], insides: Any, further: int) -> tuple[list[Any], dict[str, Any]]:
    (inside,), given = insides, eqn.params
    name = _place(given)
    takes_constants = isinstance(given[name], compat.ClosedJaxpr)
    consts = [] if takes_constants and all(map(compat.is_concrete, inside.consts)) else inside.consts
    if consts:
        inside = _with_constants_as_arguments(inside)
    params: dict[str, Any] = {name: inside if takes_constants else compat.without_constants(inside)}
    added = len(operands) - len(eqn.invars)
    return [*consts, *operands], params | compat.with_entries(given, len(consts), added, further)


def _scan(eqn: Any, operands: list[Any], insides: Any, further: int) -> tuple[list[Any], dict[str, Any]]:
    (body,) = insides
    constants = compat.scan_counts(eqn.params)[0] + len(operands) - len(eqn.invars) + len(body.consts)
    return [*body.consts, *operands], compat.scan_params(eqn.params, _with_constants_as_arguments(body), constants)


def _while(eqn: Any, operands: list[Any], insides: Any, further: int) -> tuple[list[Any], dict[str, Any]]:
    condition, body = insides
    first_body = eqn.params["cond_nconsts"]
    first_carry = len(operands) - len(eqn.outvars) - further
    params = {
        "cond_jaxpr": _with_constants_as_arguments(condition),
        "cond_nconsts": len(condition.consts) + first_body,
        "body_jaxpr": _with_constants_as_arguments(body),
        "body_nconsts": len(body.consts) + first_carry - first_body,
    }
    return [*condition.consts, *operands[:first_body], *body.consts, *operands[first_body:]], params


def _cond(eqn: Any, operands: list[Any], insides: Any, further: int) -> tuple[list[Any], dict[str, Any]]:
    consts: dict[Any, Any] = {}
    for branch in insides:
        consts.update(zip(branch.jaxpr.constvars, branch.consts, strict=True))
    branches = tuple(compat.ClosedJaxpr(compat.without_constants(branch, consts), ()) for branch in insides)
    return [operands[0], *consts.values(), *operands[1:]], {"branches": branches}


def _with_constants_as_arguments(traced: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    return compat.ClosedJaxpr(compat.without_constants(traced), ()) if traced.consts else traced


def custom_functions(eqn: Any) -> tuple[Any, ...]:
    """The function of ``custom_jvp_call`` or ``custom_vjp_call``, and the rules of its derivative."""
    return tuple(eqn.primitive.get_bind_params(eqn.params)["subfuns"])


def _bind_custom(eqn: Any, operands: Sequence[Any], insides: Sequence[Any]) -> list[Any]:
    params = dict(eqn.primitive.get_bind_params(eqn.params))
    pairs = zip(insides, params.pop("subfuns"), strict=True)
    wrapped = tuple(wrap_init(function, debug_info=like.debug_info) for function, like in pairs)
    return list(eqn.primitive.bind(*operands, subfuns=wrapped, **params))


def sharded(params: Mapping[str, Any], operands: Sequence[Any], function: Callable[..., list[Any]]) -> list[Any]:
    """The results of a ``shard_map`` with another function for the values of one device, and further ones stacked."""
    out_specs = tuple(params["out_specs"])

    def of_one_device(*values: Any) -> tuple[Any, ...]:
        outs = function(*values)
        # One row for each device, so that none of them waits for another.
        return tuple(outs[: len(out_specs)]), tuple(value[None] for value in outs[len(out_specs) :])

    outs, further = jax.shard_map(
        of_one_device,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(out_specs, PartitionSpec(manual_axes(params))),
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"]),
    )(*operands)
    return [*outs, *further]


def manual_axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes of the mesh that a ``shard_map`` makes manual."""
    return tuple(params["newly_manual_axes"] or params["mesh"].shape)


_FORMS: Final[Mapping[str | None, Callable[[Any, list[Any], Any, int], tuple[list[Any], dict[str, Any]]]]] = (
    MappingProxyType(
        {
            **dict.fromkeys(("call", "checkpoint", "composite", "custom_vmap", "linear_call"), _call),
            "cond": _cond,
            "scan": _scan,
            "while": _while,
        }
    )
)
"""`PrimitiveKind` of `xla_amp.jax.primitives` -> operands and parameters of its primitives with others inside."""

KINDS: Final = frozenset((*_FORMS, "custom_jvp", "custom_vjp", "shard_map"))
"""`PrimitiveKind` of all primitives that `bind` takes, which contain jaxprs."""
