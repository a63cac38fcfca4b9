"""Statistics of a program's layers as further results: a jaxpr is evaluated again, and its loops and calls return more.

The activations of a layer are the floating-point values that its name scope computes, not from constants alone, and
that code outside of the scope reads, in the forward pass.  Values that only the backward pass reads, and what it
recomputes, do not count.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.common.types import ValueKind
from xla_amp.jax import compat, observations, rebind
from xla_amp.jax.observations import SCALARS, Mark
from xla_amp.jax.primitives import info
from xla_amp.lowering.training import statistics
from xla_amp.policy import module_patterns
from xla_amp.tools.monitor.history import Sums, ValueKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to record."""

    layers: tuple[str, ...]
    kinds: tuple[ValueKind, ...]
    zero: float
    """Largest magnitude that the low dtype rounds to zero."""

    def takes(self, key: ValueKey) -> bool:
        """Whether the values of a layer are recorded."""
        return key.kind in self.kinds and any(module_patterns.selects(pattern, key.layer) for pattern in self.layers)


_Label: TypeAlias = "ValueKey | str"
"""Of what a program records: the values of a layer, or a scalar."""


class Observed(NamedTuple):
    """What a program recorded."""

    sums: dict[ValueKey, jax.Array]
    """float32 (7): fields of `xla_amp.tools.monitor.history.Sums`."""
    scalars: dict[str, jax.Array]
    """float32 (): by a name of `SCALARS`; ``norm2`` is the sum of the squares of all gradients, nonfinite if one is."""


def evaluate(closed: Any, values: Sequence[Any], wanted: Wanted) -> tuple[list[Any], Observed]:
    """The results of a jaxpr, and what it recorded."""
    collector = _Collector(wanted, ())
    outs = collector.evaluate(closed, values, [True] * len(closed.jaxpr.outvars))
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
        self.rows: dict[ValueKey, list[Any]] = {}
        self.scalars: dict[str, Any] = {}
        self.scale: Any = 1.0
        """The loss scale, once it was observed."""
        self.axes: dict[str, int] = {}
        """Axes of the shard_map around, with their sizes."""

    def found(self) -> Observed:
        """What has been recorded, joined."""
        sums = {key: rows[0] if len(rows) == 1 else statistics.joined(rows) for key, rows in self.rows.items()}
        return Observed(sums, dict(self.scalars))

    def results(self) -> tuple[list[_Label], list[Any]]:
        """What has been recorded, as further results, and of what."""
        sums, scalars = self.found()
        return [*sums, *scalars], [*sums.values(), *scalars.values()]

    def add(self, label: _Label, value: Any) -> None:
        """Adds what a part of the program recorded."""
        if isinstance(label, ValueKey):
            self.rows.setdefault(label, []).append(value)
        else:
            self._scalar(label, value)

    def _scalar(self, name: str, value: Any) -> None:
        if name == "norm2" and name in self.scalars:
            value = self.scalars[name] + value
        self.scalars[name] = value
        if name == "loss_scale":
            self.scale = value

    def record(self, key: ValueKey, value: Any) -> None:
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

    def _add(self, key: ValueKey, weight: float, row: Any) -> Any:
        """Adds the sums of a value, and returns them as this device counts them."""
        row = row if weight == 1 else jnp.concatenate([row[:1], row[1:] * weight])
        self.rows.setdefault(key, []).append(row)
        return row

    def _weight(self, value: Any) -> float:
        """What a value of this device counts: values that devices share count once."""
        varies = compat.varying_axes(value)
        return 1.0 / math.prod(size for axis, size in self.axes.items() if axis not in varies)

    def observed(self, mark: Mark, value: Any) -> None:
        """Records what `observe` has marked."""
        if mark.what in SCALARS:
            self._scalar(mark.what, lax.stop_gradient(value).astype(jnp.float32).reshape(()))
        else:
            kind: Any = mark.what
            self.record(ValueKey(mark.layer, kind), value)

    def evaluate(self, closed: Any, values: Sequence[Any], read: Sequence[bool]) -> list[Any]:
        """The results of a jaxpr.

        Args:
            closed: the program.
            values: its arguments.
            read: which results the forward pass, or the caller, reads.
        """
        readers, constant = _readers(closed.jaxpr, read), _constants(closed.jaxpr)

        def process(eqn: Any, operands: list[Any]) -> list[Any]:
            backward = _is_backward(eqn)
            scopes = compat.scopes(eqn)
            flags = [bool(readers.get(var)) for var in eqn.outvars]
            outs = self._results(eqn, operands, scopes, flags, backward)
            mark = None if backward else observations.mark_of(eqn)
            computed = bool(scopes) and not backward and not constant.issuperset(compat.variables(eqn.invars))
            for var, out in zip(eqn.outvars, outs, strict=True):
                leaves = any(reader[: len(scopes)] != scopes for reader in readers.get(var, ()))
                if computed and leaves and jnp.issubdtype(var.aval.dtype, jnp.floating):
                    self.record(ValueKey(".".join((*self.path, *scopes)), "activation"), out)
                if mark is not None:
                    self.observed(mark, out)
            return outs

        return rebind.evaluate(closed, values, process)

    def _results(
        self, eqn: Any, operands: list[Any], scopes: tuple[str, ...], flags: list[bool], backward: bool
    ) -> list[Any]:
        rule = None if backward else _RULES.get(info(eqn.primitive.name).kind)
        if rule is not None:
            outs = rule(_Part(self, eqn, operands, (*self.path, *scopes), flags))
            if outs is not None:
                return outs
        return rebind.bind_as_written(eqn, operands)


def _readers(jaxpr: Any, read: Sequence[bool]) -> dict[Any, list[tuple[str, ...]]]:
    """Variable -> name scopes of the equations of the forward pass that read it; ``()`` for a result that is read."""
    found: dict[Any, list[tuple[str, ...]]] = {}
    for eqn in jaxpr.eqns:
        if not _is_backward(eqn):
            scopes = compat.scopes(eqn)
            for variable in compat.variables(eqn.invars):
                found.setdefault(variable, []).append(scopes)
    for variable in compat.variables(itertools.compress(jaxpr.outvars, read)):
        found.setdefault(variable, []).append(())
    return found


def _constants(jaxpr: Any) -> set[Any]:
    """Variables that are computed from constants of the program alone."""
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        if found.issuperset(compat.variables(eqn.invars)):
            found.update(eqn.outvars)
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

    def traced(self, closed: compat.ClosedJaxpr, read: Sequence[bool]) -> tuple[compat.ClosedJaxpr, list[_Label]]:
        """A jaxpr whose further results are what it records, and of what."""
        labels: list[_Label] = []

        def run(*values: Any) -> list[Any]:
            inner = self.inner()
            outs = inner.evaluate(closed, values, read)
            labels[:], recorded = inner.results()
            return [*outs, *recorded]

        return compat.trace(run, closed.in_avals, closed.jaxpr.debug_info), labels

    def bind(
        self,
        operands: Sequence[Any],
        insides: Sequence[Any],
        labels: Sequence[_Label],
        join: Callable[[_Label, Any], Any] = lambda _, value: value,
    ) -> list[Any]:
        """Binds the primitive with jaxprs that record; returns its results, and adds the further ones to what is found.

        Args:
            operands: of the primitive.
            insides: as for `rebind.bind`.
            labels: of the further results.
            join: makes of a further result what is recorded.
        """
        outs = rebind.bind(self.eqn, operands, insides, len(labels))
        count = len(self.eqn.outvars)
        for label, value in zip(labels, outs[count:], strict=True):
            self.collector.add(label, join(label, value))
        return outs[:count]


_Rule = Callable[[_Part], "list[Any] | None"]


def _call(part: _Part) -> list[Any] | None:
    traced, labels = part.traced(rebind.inner(part.eqn.params), part.read)
    return part.bind(part.operands, [traced], labels) if labels else None


def _scan(part: _Part) -> list[Any] | None:
    body = rebind.inner(part.eqn.params)
    carried = len(rebind.scanned(part.eqn.params, part.operands)[1])
    traced, labels = part.traced(body, [*[True] * carried, *part.read[carried:]])
    return part.bind(part.operands, [traced], labels, _over_iterations) if labels else None


def _over_iterations(label: _Label, values: Any) -> Any:
    """What iterations have recorded, along the first axis, together."""
    if isinstance(label, ValueKey):
        return _joined(values)
    return jnp.sum(values) if label == "norm2" else values[-1]


def _joined(rows: Any) -> Any:
    return jnp.concatenate([rows[:, :1].max(0), rows[:, 1:].sum(0)])


def _zero(label: _Label) -> Any:
    return jnp.zeros(statistics.FIELDS if isinstance(label, ValueKey) else (), jnp.float32)


def _while(part: _Part) -> list[Any] | None:
    condition, body = part.eqn.params["cond_jaxpr"], part.eqn.params["body_jaxpr"]
    count = len(part.eqn.outvars)
    traced, labels = part.traced(body, [True] * count)
    if not labels:
        return None

    def more(*values: Any) -> list[Any]:
        outs = compat.eval_jaxpr(traced, values[: -len(labels)])
        pairs = zip(labels, values[-len(labels) :], outs[count:], strict=True)
        return [*outs[:count], *(_over_iterations(label, jnp.stack([old, new])) for label, old, new in pairs)]

    def proceed(*values: Any) -> list[Any]:
        return compat.eval_jaxpr(condition, values[: -len(labels)])

    start = [_zero(label) for label in labels]
    added = [compat.typeof(value) for value in start]
    new_condition = compat.trace(proceed, [*condition.in_avals, *added], condition.jaxpr.debug_info)
    new_body = compat.trace(more, [*body.in_avals, *added], body.jaxpr.debug_info)
    return part.bind([*part.operands, *start], [new_condition, new_body], labels)


def _cond(part: _Part) -> list[Any] | None:
    branches = [part.traced(branch, part.read) for branch in part.eqn.params["branches"]]
    labels = list(dict.fromkeys(label for _, own in branches for label in own))
    if not labels:
        return None
    count = len(part.eqn.outvars)
    otherwise = {label: _zero(label) for label in labels}
    otherwise.update((name, value) for name, value in part.collector.scalars.items() if name != "norm2")

    def with_all(traced: compat.ClosedJaxpr, own: Sequence[_Label]) -> compat.ClosedJaxpr:
        def run(*values: Any) -> list[Any]:
            outs = compat.eval_jaxpr(traced, values)
            recorded = {**otherwise, **dict(zip(own, outs[count:], strict=True))}
            return [*outs[:count], *(recorded[label] for label in labels)]

        return compat.trace(run, traced.in_avals, traced.jaxpr.debug_info)

    return part.bind(part.operands, [with_all(*each) for each in branches], labels)


def _shard_map(part: _Part) -> list[Any] | None:
    params = part.eqn.params
    labels: list[_Label] = []

    def shard(*values: Any) -> list[Any]:
        inner = part.inner()
        inner.axes = {**inner.axes, **{axis: params["mesh"].shape[axis] for axis in rebind.manual_axes(params)}}
        outs = inner.evaluate(rebind.inner(params), values, part.read)
        labels[:], recorded = inner.results()
        return [*outs, *recorded]

    return part.bind(part.operands, [shard], labels, _over_devices)


def _over_devices(label: _Label, values: Any) -> Any:
    """What devices have recorded, along the first axis, together."""
    return _joined(values) if isinstance(label, ValueKey) else _ON_DEVICES[label](values)


_ON_DEVICES: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {"loss": jnp.mean, "loss_scale": lambda column: column[0], "norm2": jnp.sum, "skipped": jnp.max}
)
"""Scalar -> what its values on the devices of a `jax.shard_map` make together."""


_RULES: Final[Mapping[str | None, _Rule]] = MappingProxyType(
    {"call": _call, "checkpoint": _call, "cond": _cond, "scan": _scan, "shard_map": _shard_map, "while": _while}
)
"""Kind of primitive (`xla_amp.jax.primitives.PrimitiveKind`) -> how to record inside of it.

Functions with a custom derivative are operations: their results count, not what is inside.
"""
