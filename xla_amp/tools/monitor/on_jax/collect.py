"""Statistics of a program's layers as further results: a jaxpr is evaluated again, and its loops and calls return more.

The activations of a layer are the floating-point values that its name scope computes and that code outside of the scope
reads, in the forward pass.  Values that only the backward pass reads, and what it recomputes, do not count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from xla_amp.jax import compat
from xla_amp.jax.observations import MARK, SCALARS
from xla_amp.jax.primitives import info
from xla_amp.lowering.training import statistics
from xla_amp.policy import module_patterns
from xla_amp.tools.monitor.history import Key, Sums
from xla_amp.types import Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to record."""

    layers: tuple[str, ...]
    kinds: tuple[Kind, ...]
    zero: float
    """Largest magnitude that the low dtype rounds to zero."""

    def takes(self, key: Key) -> bool:
        """Whether the values of a layer are recorded."""
        return key.kind in self.kinds and any(module_patterns.selects(pattern, key.layer) for pattern in self.layers)


class Found(NamedTuple):
    """What a program recorded."""

    sums: dict[Key, jax.Array]
    """float32 (7): fields of `xla_amp.tools.monitor.history.Sums`."""
    scalars: dict[str, jax.Array]
    """float32 (): by a name of `SCALARS`; ``norm2`` is the sum of the squares of all gradients, nonfinite if one is."""


def evaluate(closed: Any, values: Sequence[Any], wanted: Wanted) -> tuple[list[Any], Found]:
    """The results of a jaxpr, and what it recorded."""
    collector = _Collector(wanted, ())
    outs = collector.evaluate(closed.jaxpr, closed.consts, values, [True] * len(closed.jaxpr.outvars))
    return outs, collector.found()


class _Collector:
    """Evaluates one jaxpr, and what it calls, in the current trace.

    Args:
        wanted: what to record.
        path: name scopes around the jaxpr.
    """

    def __init__(self, wanted: Wanted, path: tuple[str, ...]) -> None:
        self.wanted = wanted
        self.path = path
        self.rows: dict[Key, list[Any]] = {}
        self.scalars: dict[str, Any] = {}
        self.scale: Any = 1.0
        """The loss scale, once it was observed."""
        self.axes: dict[str, int] = {}
        """Axes of the shard_map around, with their sizes."""

    def found(self) -> Found:
        """What has been recorded, joined."""
        sums = {key: rows[0] if len(rows) == 1 else statistics.joined(rows) for key, rows in self.rows.items()}
        return Found(sums, dict(self.scalars))

    def add(self, found: Found) -> None:
        """Adds what a part of the program recorded."""
        for key, row in found.sums.items():
            self.rows.setdefault(key, []).append(row)
        for name, value in found.scalars.items():
            self._scalar(name, value)

    def _scalar(self, name: str, value: Any) -> None:
        if name == "norm2" and name in self.scalars:
            value = self.scalars[name] + value
        self.scalars[name] = value
        if name == "loss_scale":
            self.scale = value

    def record(self, key: Key, value: Any) -> None:
        """Records a floating-point value."""
        value = lax.stop_gradient(value)
        weight, row = self._weight(value), None
        if self.wanted.takes(key):
            scale = self.scale if key.kind == "gradient" else 1.0
            row = self._add(key, weight, statistics.sums(value, self.wanted.zero, scale=scale))
        if key.kind == "gradient":
            self._norm(value, weight, row)

    def _norm(self, value: Any, weight: float, row: Any) -> None:
        """Adds a gradient, whose sums are `row` if they were computed, to the norm of all."""
        if row is not None:
            sums = Sums(*row)
            self._scalar("norm2", jnp.where(sums.inf + sums.nan > 0, jnp.inf, sums.squares))
        elif self.wanted.kinds or "skipped" not in self.scalars:
            # It reads all gradients: without statistics, only where nothing else tells that they are not finite.
            wide = value.astype(jnp.float32)
            self._scalar("norm2", jnp.sum(wide * wide) * weight)

    def _add(self, key: Key, weight: float, row: Any) -> Any:
        """Adds the sums of a value, and returns them as this device counts them."""
        row = row if weight == 1 else jnp.concatenate([row[:1], row[1:] * weight])
        self.rows.setdefault(key, []).append(row)
        return row

    def _weight(self, value: Any) -> float:
        """What a value of this device counts: values that devices share count once."""
        varies = compat.varying_axes(value)
        return 1.0 / math.prod(size for axis, size in self.axes.items() if axis not in varies)

    def observed(self, mark: str, value: Any) -> None:
        """Records what `observe` has marked."""
        _, what, layer = mark.split("|")
        if what in SCALARS:
            self._scalar(what, lax.stop_gradient(value).astype(jnp.float32).reshape(()))
        else:
            kind: Any = what
            self.record(Key(layer, kind), value)

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], read: Sequence[bool]) -> list[Any]:
        """The results of a jaxpr.

        Args:
            jaxpr: the program.
            consts: its constants.
            values: its arguments.
            read: which results the forward pass, or the caller, reads.
        """
        environment: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        readers = _readers(jaxpr, read)

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, compat.Literal) else environment[atom]

        for eqn in jaxpr.eqns:
            operands = [value_of(atom) for atom in eqn.invars]
            backward = _is_backward(eqn)
            scopes = compat.scopes(eqn)
            with compat.equation_context(eqn):
                flags = [bool(readers.get(var)) for var in eqn.outvars]
                outs = self._results(eqn, operands, scopes, flags, backward)
                layer = ".".join((*self.path, *scopes))
                for var, out in zip(eqn.outvars, outs, strict=True):
                    leaves = any(reader[: len(scopes)] != scopes for reader in readers.get(var, ()))
                    if scopes and not backward and leaves and jnp.issubdtype(var.aval.dtype, jnp.floating):
                        self.record(Key(layer, "activation"), out)
                    if eqn.primitive.name == "name" and eqn.params["name"].startswith(f"{MARK}|") and not backward:
                        self.observed(eqn.params["name"], out)
            environment.update(zip(eqn.outvars, outs, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _results(
        self, eqn: Any, operands: list[Any], scopes: tuple[str, ...], flags: list[bool], backward: bool
    ) -> list[Any]:
        rule = None if backward else _RULES.get(info(eqn.primitive.name).kind)
        if rule is not None:
            outs = rule(_Part(self, eqn, operands, (*self.path, *scopes), flags))
            if outs is not None:
                return outs
        return compat.bind(eqn.primitive, operands, eqn.params)


def _readers(jaxpr: Any, read: Sequence[bool]) -> dict[Any, list[tuple[str, ...]]]:
    """Variable -> name scopes of the equations of the forward pass that read it; ``()`` for a result that is read."""
    found: dict[Any, list[tuple[str, ...]]] = {}
    for eqn in jaxpr.eqns:
        if not _is_backward(eqn):
            scopes = compat.scopes(eqn)
            for atom in eqn.invars:
                if not isinstance(atom, compat.Literal):
                    found.setdefault(atom, []).append(scopes)
    for atom, flag in zip(jaxpr.outvars, read, strict=True):
        if flag and not isinstance(atom, compat.Literal):
            found.setdefault(atom, []).append(())
    return found


def _is_backward(eqn: Any) -> bool:
    stack = compat.name_stack(eqn)
    return any(compat.is_transpose_scope(scope) or str(scope.name) == compat.REMATTED for scope in stack)


class _Part(NamedTuple):
    """An equation that contains jaxprs."""

    collector: _Collector
    eqn: Any
    operands: list[Any]
    path: tuple[str, ...]
    read: list[bool]
    """Which of its results the forward pass reads."""

    def inner(self) -> _Collector:
        """A collector for a jaxpr of the equation."""
        inner = _Collector(self.collector.wanted, self.path)
        inner.scale, inner.axes = self.collector.scale, self.collector.axes
        return inner

    def traced(self, jaxpr: Any, avals: Sequence[Any], read: Sequence[bool]) -> tuple[Any, list[Key], list[str]]:
        """A jaxpr whose further results are what it records: a row for each key, then scalars; None without any."""
        closed = jaxpr if isinstance(jaxpr, compat.ClosedJaxpr) else compat.ClosedJaxpr(jaxpr, ())
        keys: list[Key] = []
        names: list[str] = []

        def run(*values: Any) -> list[Any]:
            inner = self.inner()
            outs = inner.evaluate(closed.jaxpr, closed.consts, values, read)
            found = inner.found()
            keys[:], names[:] = found.sums, found.scalars
            return [*outs, *found.sums.values(), *found.scalars.values()]

        traced = compat.trace(run, avals, closed.jaxpr.debug_info)
        return traced if keys or names else None, keys, names

    def finish(self, outs: Sequence[Any], keys: Sequence[Key], names: Sequence[str]) -> list[Any]:
        """Takes the further results off and adds them to what was recorded."""
        count = len(self.eqn.outvars)
        rows, scalars = outs[count : count + len(keys)], outs[count + len(keys) :]
        self.collector.add(Found(dict(zip(keys, rows, strict=True)), dict(zip(names, scalars, strict=True))))
        return list(outs[:count])


_Rule = Callable[[_Part], "list[Any] | None"]


def _call(part: _Part) -> list[Any] | None:
    name = "jaxpr" if "jaxpr" in part.eqn.params else "call_jaxpr"
    traced, keys, names = part.traced(part.eqn.params[name], [compat.typeof(v) for v in part.operands], part.read)
    if traced is None:
        return None
    outer = _closed_over(traced)
    new = outer if isinstance(part.eqn.params[name], compat.ClosedJaxpr) else outer.jaxpr
    params = {**part.eqn.params, name: new}
    for setting, value in compat.per_operand_params().items():
        if setting in params:
            params[setting] = (*(value for _ in traced.consts), *params[setting])
    for setting, value in compat.per_result_params().items():
        if setting in params:
            params[setting] = (*params[setting], *(value for _ in (*keys, *names)))
    return part.finish(compat.bind(part.eqn.primitive, [*traced.consts, *part.operands], params), keys, names)


def _closed_over(traced: Any) -> Any:
    """The jaxpr with its constants as leading arguments."""
    return compat.ClosedJaxpr(compat.without_constants(traced), ())


def _scan(part: _Part) -> list[Any] | None:
    params = part.eqn.params
    constants, carried = compat.scan_counts(params)
    body = params["jaxpr"]
    read = [*[True] * carried, *part.read[carried:]]
    traced, keys, names = part.traced(body, body.in_avals, read)
    if traced is None:
        return None
    new = compat.scan_params(params, _closed_over(traced), len(traced.consts) + constants)
    outs = compat.bind(part.eqn.primitive, [*traced.consts, *part.operands], new)
    count = len(part.eqn.outvars)
    rows = [_joined(row) for row in outs[count : count + len(keys)]]
    scalars = [
        jnp.sum(column) if name == "norm2" else column[-1]
        for name, column in zip(names, outs[count + len(keys) :], strict=True)
    ]
    return part.finish([*outs[:count], *rows, *scalars], keys, names)


def _joined(rows: Any) -> Any:
    return jnp.concatenate([rows[:, :1].max(0), rows[:, 1:].sum(0)])


def _while(part: _Part) -> list[Any] | None:
    params = part.eqn.params
    first_body = params["cond_nconsts"]
    first_carry = first_body + params["body_nconsts"]
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    carry = len(part.eqn.outvars)
    traced, keys, names = part.traced(body, body.in_avals, [True] * carry)
    if traced is None:
        return None
    extra = len(keys) + len(names)

    def more(*values: Any) -> list[Any]:
        inside, before = values[: len(values) - extra], values[len(values) - extra :]
        outs = compat.eval_jaxpr(traced, inside)
        rows = [_joined(jnp.stack(pair)) for pair in zip(before, outs[carry:], strict=False)][: len(keys)]
        scalars = [
            old + new if name == "norm2" else new
            for name, old, new in zip(names, before[len(keys) :], outs[carry + len(keys) :], strict=True)
        ]
        return [*outs[:carry], *rows, *scalars]

    def proceed(*values: Any) -> list[Any]:
        return compat.eval_jaxpr(condition, values[: len(values) - extra])

    start = [*(jnp.zeros(statistics.FIELDS, jnp.float32) for _ in keys), *(jnp.zeros((), jnp.float32) for _ in names)]
    added = [compat.typeof(value) for value in start]
    new_body = compat.trace(more, [*body.in_avals, *added], body.jaxpr.debug_info)
    new_condition = compat.trace(proceed, [*condition.in_avals, *added], condition.jaxpr.debug_info)
    new = {
        **params,
        "cond_jaxpr": _closed_over(new_condition),
        "cond_nconsts": len(new_condition.consts) + first_body,
        "body_jaxpr": _closed_over(new_body),
        "body_nconsts": len(new_body.consts) + params["body_nconsts"],
    }
    operands = [
        *new_condition.consts,
        *part.operands[:first_body],
        *new_body.consts,
        *part.operands[first_body:first_carry],
        *part.operands[first_carry:],
        *start,
    ]
    return part.finish(compat.bind(part.eqn.primitive, operands, new), keys, names)


def _cond(part: _Part) -> list[Any] | None:
    branches = part.eqn.params["branches"]
    avals = [compat.typeof(value) for value in part.operands[1:]]
    parts = [part.traced(branch, branch.in_avals, part.read) for branch in branches]
    if all(traced is None for traced, _, _ in parts):
        return None
    keys = list(dict.fromkeys(key for traced, own, _ in parts if traced is not None for key in own))
    names = list(dict.fromkeys(name for traced, _, own in parts if traced is not None for name in own))
    count = len(part.eqn.outvars)

    def chosen(branch: Any, traced: Any, own: Sequence[Key], scalars: Sequence[str]) -> Callable[..., list[Any]]:
        def run(*values: Any) -> list[Any]:
            if traced is None:
                outs, rows, numbers = compat.eval_jaxpr(branch, values), {}, {}
            else:
                results = compat.eval_jaxpr(traced, values)
                outs = results[:count]
                rows = dict(zip(own, results[count : count + len(own)], strict=True))
                numbers = dict(zip(scalars, results[count + len(own) :], strict=True))
            zeros = jnp.zeros(statistics.FIELDS, jnp.float32)
            nothing = jnp.zeros((), jnp.float32)
            before = part.collector.scalars
            return [
                *outs,
                *(rows.get(key, zeros) for key in keys),
                *(numbers.get(n, nothing if n == "norm2" else before.get(n, nothing)) for n in names),
            ]

        return run

    functions = [chosen(branch, *each) for branch, each in zip(branches, parts, strict=True)]
    traces = [compat.trace(run, avals, b.jaxpr.debug_info) for run, b in zip(functions, branches, strict=True)]
    consts = [value for traced in traces for value in traced.consts]
    new = []
    start = 0
    for traced in traces:
        new.append(_with_all_constants(traced, start, consts, avals))
        start += len(traced.consts)
    params = {**part.eqn.params, "branches": tuple(new)}
    return part.finish(
        compat.bind(part.eqn.primitive, [part.operands[0], *consts, *part.operands[1:]], params), keys, names
    )


def _with_all_constants(traced: Any, start: int, consts: Sequence[Any], avals: Sequence[Any]) -> Any:
    """A branch that takes the constants of all branches first."""

    def run(*values: Any) -> list[Any]:
        own = values[start : start + len(traced.consts)]
        return compat.eval_jaxpr(_closed_over(traced), [*own, *values[len(consts) :]])

    return compat.trace(run, [*(compat.typeof(value) for value in consts), *avals], traced.jaxpr.debug_info)


def _shard_map(part: _Part) -> list[Any] | None:
    params = part.eqn.params
    sizes = dict(params["mesh"].shape)
    axes = tuple(params["newly_manual_axes"] or sizes)
    keys: list[Key] = []
    names: list[str] = []

    def shard(*values: Any) -> tuple[Any, ...]:
        inner = part.inner()
        inner.axes = {**inner.axes, **{axis: sizes[axis] for axis in axes}}
        outs = inner.evaluate(params["jaxpr"], (), values, part.read)
        found = inner.found()
        keys[:], names[:] = found.sums, found.scalars
        # One row for each device, so that none of them waits for another.
        return tuple(outs), tuple(value[None] for value in (*found.sums.values(), *found.scalars.values()))

    mapped = jax.shard_map(
        shard,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), PartitionSpec(axes)),
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"] or ()),
    )
    outs, recorded = mapped(*part.operands)
    rows = [_joined(row) for row in recorded[: len(keys)]]
    scalars = [_ON_DEVICES[name](column) for name, column in zip(names, recorded[len(keys) :], strict=True)]
    return part.finish([*outs, *rows, *scalars], keys, names)


_ON_DEVICES: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {"loss": jnp.mean, "loss_scale": lambda column: column[0], "norm2": jnp.sum, "skipped": jnp.max}
)
"""Scalar -> what its values on the devices of a `jax.shard_map` make together."""


_RULES: Final[Mapping[str | None, _Rule]] = MappingProxyType(
    {"call": _call, "checkpoint": _call, "cond": _cond, "scan": _scan, "shard_map": _shard_map, "while": _while}
)
"""Kind of primitive (`xla_amp.jax.primitives.Kind`) -> how to record inside of it.

Functions with a custom derivative are operations: their results count, not what is inside.
"""
