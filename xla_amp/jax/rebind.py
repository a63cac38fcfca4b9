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
from typing import Any, Final, NamedTuple, TypeVar

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


class Rebinding(NamedTuple):
    """A primitive that is bound again."""

    eqn: Any
    """Its equation."""
    operands: list[Any]
    """Of the new primitive, in the order of the equation's; see above for further ones."""
    insides: tuple[Any, ...]
    """The new jaxprs: the body; of ``while`` the condition and the body; of ``cond`` the branches, whose results have
    equal types.  Where JAX traces again, functions of flat values to flat values: the body of ``shard_map``, for one
    device's values; of a custom derivative the function and its rules."""
    further: int
    """How many results the new primitive has besides those of the equation; not for ``shard_map``."""
    changed: dict[str, Any]
    """Other parameters."""

    def bind(self, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        """Binds the primitive with these operands and parameters that follow from its jaxprs."""
        return compat.bind(self.eqn.primitive, operands, {**self.eqn.params, **params, **self.changed})


def bind(eqn: Any, operands: Sequence[Any], insides: Sequence[Any], further: int = 0, **changed: Any) -> list[Any]:
    """Binds the primitive of an equation with others inside; the arguments are those of `Rebinding`."""
    new = Rebinding(eqn, list(operands), tuple(insides), further, changed)
    return BINDINGS[info(eqn.primitive.name).kind](new)


def _bind_call(new: Rebinding) -> list[Any]:
    (inside,), given = new.insides, new.eqn.params
    name = _place(given)
    takes_constants = isinstance(given[name], compat.ClosedJaxpr)
    consts = [] if takes_constants and all(map(compat.is_concrete, inside.consts)) else inside.consts
    if consts:
        inside = _with_constants_as_arguments(inside)
    params: dict[str, Any] = {name: inside if takes_constants else compat.without_constants(inside)}
    further = len(new.operands) - len(new.eqn.invars)
    return new.bind([*consts, *new.operands], params | compat.with_entries(given, len(consts), further, new.further))


def _bind_scan(new: Rebinding) -> list[Any]:
    (body,), given = new.insides, new.eqn.params
    constants = compat.scan_counts(given)[0] + len(new.operands) - len(new.eqn.invars) + len(body.consts)
    params = compat.scan_params(given, _with_constants_as_arguments(body), constants)
    return new.bind([*body.consts, *new.operands], params)


def _bind_while(new: Rebinding) -> list[Any]:
    condition, body = new.insides
    first_body = new.eqn.params["cond_nconsts"]
    first_carry = len(new.operands) - len(new.eqn.outvars) - new.further
    params = {
        "cond_jaxpr": _with_constants_as_arguments(condition),
        "cond_nconsts": len(condition.consts) + first_body,
        "body_jaxpr": _with_constants_as_arguments(body),
        "body_nconsts": len(body.consts) + first_carry - first_body,
    }
    of_condition, others = new.operands[:first_body], new.operands[first_body:]
    return new.bind([*condition.consts, *of_condition, *body.consts, *others], params)


def _bind_cond(new: Rebinding) -> list[Any]:
    index, *rest = new.operands
    consts: dict[Any, Any] = {}
    for branch in new.insides:
        consts.update(zip(branch.jaxpr.constvars, branch.consts, strict=True))
    branches = tuple(compat.ClosedJaxpr(compat.without_constants(branch, consts), ()) for branch in new.insides)
    return new.bind([index, *consts.values(), *rest], {"branches": branches})


def _with_constants_as_arguments(traced: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    return compat.ClosedJaxpr(compat.without_constants(traced), ()) if traced.consts else traced


def custom_functions(eqn: Any) -> tuple[Any, ...]:
    """The function of ``custom_jvp_call`` or ``custom_vjp_call``, and the rules of its derivative."""
    return tuple(eqn.primitive.get_bind_params(eqn.params)["subfuns"])


def _bind_custom(new: Rebinding) -> list[Any]:
    primitive = new.eqn.primitive
    params = dict(primitive.get_bind_params(new.eqn.params))
    pairs = zip(new.insides, params.pop("subfuns"), strict=True)
    wrapped = tuple(wrap_init(function, debug_info=like.debug_info) for function, like in pairs)
    return list(primitive.bind(*new.operands, subfuns=wrapped, **params))


def _bind_shard_map(new: Rebinding) -> list[Any]:
    (function,) = new.insides
    return sharded(new.eqn.params, new.operands, function)


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


BINDINGS: Final[Mapping[str | None, Callable[[Rebinding], list[Any]]]] = MappingProxyType(
    {
        **dict.fromkeys(("call", "checkpoint", "composite", "custom_vmap", "linear_call"), _bind_call),
        **dict.fromkeys(("custom_jvp", "custom_vjp"), _bind_custom),
        "cond": _bind_cond,
        "scan": _bind_scan,
        "shard_map": _bind_shard_map,
        "while": _bind_while,
    }
)
"""`PrimitiveKind` of `xla_amp.jax.primitives` -> how its primitives, which contain jaxprs, are bound again."""
