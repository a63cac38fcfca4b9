"""Jaxpr interpreter that applies autocast's decisions to one primitive after the other.

It names no primitive: `xla_amp.jax.primitives` sorts them into kinds, and the policy decides their dtypes.  Each kind
whose primitives contain jaxprs (control flow, calls, custom derivatives) has a rule in a table that is passed to it:
`xla_amp.jax.higher_order.handlers.HIGHER_ORDER_RULES`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import numpy as np

from xla_amp.analysis.products import Contraction
from xla_amp.common import events
from xla_amp.common.types import Cast
from xla_amp.jax import compat, rebind
from xla_amp.jax.analysis import composite_runs, float32_regions
from xla_amp.jax.analysis.exact_reads import exact_values
from xla_amp.jax.analysis.jaxprs import (
    Node,
    gradient_outputs,
    nodes,
    residual_additions,
    residual_outputs,
    rounded_first,
)
from xla_amp.jax.analysis.optimizer_part import follows_gradients
from xla_amp.jax.decisions import (
    F32,
    FEW_SUMMED,
    LOW,
    LOW_CASTS,
    Settings,
    ban_error,
    castable_dtype,
    decide,
    dtype_of,
    emit_decision,
    is_castable,
    request,
    where,
)
from xla_amp.jax.low_primitives import contract_low, described, with_stored_gradient
from xla_amp.jax.primitives import PrimitiveInfo, info, name_of
from xla_amp.jax.value_info import CastCache, Facts, Value, arrays_of, cast, inside, outside, sum_of
from xla_amp.policy import Decision, effects, op_catalog
from xla_amp.policy.cast_dtypes import cast_dtypes

FloatResults: TypeAlias = tuple[bool, ...] | None
"""For each result, whether it stays float32 if a contraction computes it; None for all."""


class Interpreter:
    """Applies the decisions of one region to the values of one program.

    Args:
        settings: of the region.
        rules: kind of higher-order primitive (`xla_amp.jax.primitives.PrimitiveKind`) -> rule.
        backward: whether the program belongs to a backward pass that JAX's own differentiation has made.
        outer: name scope and ``file:line`` of the primitive that contains the program, for reports.
        scopes: its name scopes, for rules for modules.
        saves: whether the backward pass may read what the program computes; otherwise it computes it again, or none is
            expected.
    """

    def __init__(
        self,
        settings: Settings,
        rules: HigherOrderRules,
        *,
        backward: bool = False,
        outer: tuple[str, str] = ("", ""),
        scopes: tuple[str, ...] = (),
        saves: bool = True,
    ) -> None:
        self.settings = settings
        self.rules = rules
        self.casts = CastCache(settings.low)
        self.backward = backward
        self.outer = outer
        self.scopes = scopes
        self.saves = saves and not backward
        self.residuals: frozenset[Any] = frozenset()
        """Results of sharded functions that only a backward pass reads."""
        self.streams: frozenset[Any] = frozenset()
        """Sums ``x + f(x)`` that are low if ``f(x)`` is."""

    def under(self, settings: Settings) -> Interpreter:
        """The same interpreter with other settings, of the same low dtype."""
        other = copy.copy(self)
        other.settings = settings
        return other

    def eval_jaxpr(
        self,
        closed: compat.ClosedJaxpr,
        values: Sequence[Value],
        *,
        f32_outputs: FloatResults = None,
    ) -> list[Value]:
        """Evaluates a jaxpr under autocast; results have the dtypes that follow, not those of the jaxpr.

        `f32_outputs`: which results stay float32 if a contraction computes them; None for all.
        """
        jaxpr, policy = closed.jaxpr, self.settings.policy
        equations = nodes(jaxpr)
        environment: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
        environment.update(zip(jaxpr.constvars, map(outside, closed.consts), strict=True))
        gradients = gradient_outputs(jaxpr, self.backward, f32_outputs)
        wide = gradients | exact_values(jaxpr, f32_outputs)
        optimizer = follows_gradients(jaxpr, self.settings.after_gradients)
        self.residuals = residual_outputs(jaxpr)
        as_written = bool(self.settings.as_written)
        if self.settings.residual == "low" and not as_written:
            self.streams = residual_additions(jaxpr)

        found = [] if as_written else composite_runs.runs(jaxpr, policy)
        decided: set[int] = set()
        for run in found:
            if decide(policy, "", run.operation, self.path(jaxpr.eqns[run.start]))[0].of_whole:
                decided.update(range(run.start, run.stop))
        starts = {run.start: run for run in found if run.start in decided}
        saves = self.saves and not as_written
        places = float32_regions.Candidates({}, {}, {}, {})
        if saves:
            places = float32_regions.candidates(jaxpr, policy)
        pending: collections.deque[int | float32_regions.Float32Region] = collections.deque(range(len(jaxpr.eqns)))
        while pending:
            index = pending.popleft()
            if isinstance(index, float32_regions.Float32Region):
                with compat.mesh_of_equation(jaxpr.eqns[index.members[0]]):
                    self._eval_region(jaxpr, index, environment, places)
                continue
            if index in decided:
                if index in starts:
                    with compat.mesh_of_equation(jaxpr.eqns[index]):
                        self._eval_composite(jaxpr, starts[index], environment, gradients)
                continue
            if index in places.stops:
                region = self._find_region(equations, places, index, pending, decided, environment)
                if region is not None:
                    numbers = [index, *[pending.popleft() for _ in range(region.length - 1)]]
                    # What does not depend on the region comes first.
                    pending.extendleft([region, *[n for n in reversed(numbers) if n not in region.members]])
                    continue
            eqn, process = jaxpr.eqns[index], self._as_decided
            if not equations[index].decided:
                flags = tuple(map(wide.__contains__, eqn.outvars))
                process = functools.partial(
                    self.process,
                    f32_outputs=flags,
                    after_gradients=index in optimizer,
                    rounds_first=equations[index].row.rounded_first and eqn.outvars[0] in rounded_first(jaxpr, policy),
                )
            rebind.run((eqn,), environment, process, _read)
        return [_read(environment, atom) for atom in jaxpr.outvars]

    def _find_region(
        self,
        equations: Sequence[Node],
        places: float32_regions.Candidates,
        index: int,
        pending: Iterable[Any],
        decided: set[int],
        environment: dict[Any, Any],
    ) -> float32_regions.Float32Region | None:
        """The float32 region that starts with an equation; None if it reads no low value, or JAX does not trace."""
        low = [
            variable
            for variable in equations[index].reads
            if dtype_of(array := environment[variable].array) == self.settings.low
            and not compat.is_concrete(array)
            and np.ndim(array)
        ]
        if not low:
            return None
        numbers = [index]
        for number in pending:
            if isinstance(number, float32_regions.Float32Region) or number >= places.stops[index] or number in decided:
                break
            numbers.append(number)
        region = float32_regions.find(equations, places.readers, numbers, low)
        if index in places.shared and not float32_regions.adds_gradients(equations, places, region, low):
            return None
        # A function that is called, such as `jax.nn.gelu`, finds its own region, which is traced once for all calls.
        alone = len(region.members) == 1 and equations[index].inside
        return None if alone else region

    def _eval_region(
        self,
        jaxpr: Any,
        region: float32_regions.Float32Region,
        environment: dict[Any, Any],
        places: float32_regions.Candidates,
    ) -> None:
        """Evaluates the equations of a region so that the backward pass computes them again from its operands.

        The gradient of a low operand that others compute from, too, leaves it by the float32 copy that they share.
        """
        values = {float32_regions.name(atom): _read(environment, atom) for atom in region.reads}
        arrays = {k: v for k, v in values.items() if isinstance(v.array, jax.Array) or np.ndim(v.array)}
        given = [with_stored_gradient(v.array) if v.facts.biased else v.array for v in arrays.values()]
        avals = list(map(jax.typeof, given))
        eqns = [jaxpr.eqns[number] for number in region.members]

        def given_to(arguments: Sequence[Any]) -> dict[Any, Value]:
            now = dict(zip(arrays, arguments, strict=True))
            return {key: Value(now.get(key, value.array), value.facts) for key, value in values.items()}

        def evaluate(*arguments: Any) -> list[Any]:
            inner = Interpreter(self.settings, self.rules, outer=self.outer, scopes=self.scopes, saves=False)
            inner.streams = self.streams
            inside_of = given_to(arguments)
            rebind.run(eqns, inside_of, inner.process, _read)
            return [inside_of[var].array for var in region.leaving]

        def written(*arguments: Any) -> list[Any]:
            arrays_in = {key: cast(value.array, F32) for key, value in given_to(arguments).items()}
            rebind.run(eqns, arrays_in, rebind.bind_as_written, _read_as_written)
            return [arrays_in[var] for var in region.leaving]

        in_float32 = written if float32_regions.is_float32(eqns) else None
        shared = [
            (index, value)
            for index, (key, value) in enumerate(arrays.items())
            if in_float32
            and value.array.dtype == self.settings.low
            and not places.computing.get(key, set()) <= {*region.members}
        ]
        shares, copies = [index for index, _ in shared], [self.casts.cast(value, F32) for _, value in shared]
        key = (
            self.settings,
            (self.scopes, *map(compat.scopes, eqns)) if self.settings.policy.by_module else (),
            tuple(avals),
            *[v.facts if k in arrays else float32_regions.constant_key(v.array) for k, v in values.items()],
            *[not self.streams.isdisjoint(eqn.outvars) for eqn in eqns],
            in_float32 is None,
            *shares,
            float32_regions.structure(eqns, region),
        )
        outs = float32_regions.function(key, evaluate, in_float32, avals, shares)(*given, *copies)
        environment.update(zip(region.leaving, map(inside, outs), strict=True))

    def path(self, eqn: Any) -> str | None:
        """Path of the module of an equation, if the policy has rules for modules."""
        return ".".join((*self.scopes, *compat.scopes(eqn))) if self.settings.policy.by_module else None

    def _eval_composite(
        self, jaxpr: Any, run: composite_runs.Run, environment: dict[Any, Any], gradients: frozenset[Any]
    ) -> None:
        """Evaluates the equations of a run, and adds their results to `environment`.

        The values that enter it are cast by the rule; inside, they are computed as they were written.
        """
        first = jaxpr.eqns[run.start]
        policy = self.settings.policy
        decision, reached = decide(policy, "", run.operation, self.path(first))
        if decision.cast == "ban":
            raise ban_error(run.operation, decision)
        effects.note(reached)
        reads, leaving = composite_runs.outside(jaxpr, run)
        given = [environment[var].array for var in reads]
        dtypes = tuple(map(castable_dtype, given))
        if decision.cast == "fp32_inside":
            main = max(range(len(given)), key=lambda i: (dtypes[i] is not None, compat.size(given[i])), default=0)
            dtypes = (*dtypes[main : main + 1], *dtypes)
        used, result = cast_dtypes(decision.cast, dtypes, self.settings.low, F32, mixed=False)
        used = used[len(used) - len(given) :]
        target = result or next((dtype for dtype in used if dtype is not None), F32)
        largest = max(map(compat.size, given), default=0)
        # Statistics (mean, variance, running averages) stay float32, as in torch's kernels.
        statistics = op_catalog.operation_class(run.operation) == "normalization"

        def parts(*values: Any) -> list[Any]:
            arrays = (value if to is None else cast(value, to) for value, to in zip(values, used, strict=True))
            known = dict(zip(reads, arrays, strict=True))
            rebind.run(jaxpr.eqns[run.start : run.stop], known, rebind.bind_as_written, _read_as_written)
            for var in leaving:
                small = statistics and compat.size(known[var]) < largest
                if dtype_of(known[var]) == F32 and var not in gradients and not small:
                    known[var] = cast(known[var], target)
            return [known[var] for var in leaving]

        outs = _recomputed(parts, given) if decision.cast == "fp32_inside" else parts(*given)
        environment.update(zip(leaving, map(inside, outs), strict=True))
        if events.decided.listeners:
            shown = [
                value if to is None else jax.ShapeDtypeStruct((), to) for value, to in zip(given, used, strict=True)
            ]
            emit_decision(policy, run.operation, decision, given, shown, outs, where(self.outer, first))

    def _as_decided(self, eqn: Any, operands: list[Value]) -> list[Value]:
        """The results of an equation that an inner region has decided."""
        return list(map(inside, rebind.bind_as_written(eqn, self.cast_to_avals(operands, avals_of(eqn)))))

    def process(
        self,
        eqn: Any,
        operands: list[Value],
        *,
        f32_outputs: FloatResults = None,
        after_gradients: bool = False,
        rounds_first: bool = False,
    ) -> list[Value]:
        """Binds the primitive of an equation under autocast and returns its results.

        `f32_outputs`: for each result, whether it stays float32; `after_gradients`: whether the equation belongs to the
        optimizer of a training step; `rounds_first`: whether its operand is rounded in place of its result.
        """
        primitive, params = eqn.primitive, eqn.params
        row = info(primitive.name)
        if row.adds_devices and compat.low_sums_crash():
            operands = [Value(self.casts.cast(value, F32), value.facts) for value in operands]
        kind = row.kind
        if kind in self.rules:
            call = HigherOrderCall(eqn, operands, f32_outputs, self, after_gradients)
            return self.rules[kind](call)
        avals = [atom.aval for atom in eqn.invars]
        kept = self.settings.as_written
        product = None
        if kind == "contraction":
            product = described(primitive, params, avals[0], avals[1])
            kept = kept or self._kept(operands, eqn, after_gradients)
        path = self.path(eqn)
        decision, reached = decide(self.settings.policy, name_of(eqn), product.aten if product else "", path)
        if product and product.sums_few and not kept and not decision.from_user:
            kept = FEW_SUMMED
        told = ""
        if reached or path:
            effects.note(reached, kept or _why_fixed(decision, row), path)
        if decision.cast == "ban":
            raise ban_error(primitive.name, decision)
        # `CastCache.adopts_dtype` judges a literal by its value.
        weak = [not isinstance(a, compat.Literal) and bool(getattr(a.aval, "weak_type", False)) for a in eqn.invars]
        if decision.rule is None and kind is None:
            decision = self._unruled(row, decision, operands, weak, avals)
        results: list[Value] | None = None
        if product and decision.cast in ("low", "low_fp32_out") and not kept:
            wide = decision.cast == "low_fp32_out" or any(f32_outputs or ())
            used, result = self._contract(eqn, operands, avals, product, wide)
            outs, results = [result.array], [result]
        elif self.settings.as_written:
            used = self.cast_to_avals(operands, avals)
            outs = compat.bind(primitive, used, params)
        elif kind == "contraction":
            used, params = self._written(decision, operands, eqn, weak, kept)
            outs = compat.bind(primitive, used, params)
        elif decision.cast == "fp32_inside" and kind not in ("conversion", "fixed_dtype"):
            used, outs = self._inside(decision, operands, eqn, weak)
        else:
            low = self.settings.low
            if not self.streams.isdisjoint(eqn.outvars) and low in map(dtype_of, arrays_of(operands)):
                operands, told = [inside(self.casts.cast(value, low)) for value in operands], _RESIDUAL
            elif rounds_first and decision.rule is None:
                operands, told = [inside(self.casts.cast(value, low)) for value in operands], _PICKED
            used, params = self._cast(row, decision, operands, weak, eqn)
            if row.indexed_by and not self.backward and float32_regions.reads_again(eqn) and dtype_of(used[0]) == low:
                read = [self.casts.cast(operands[0], F32), *used[1:]]  # gradients of one element add up in float32
                outs = [cast(out, low) for out in compat.bind(primitive, read, params)]
            else:
                outs = compat.bind(primitive, used, params)
            if row.adds:
                results = [sum_of(operands, outs[0])]
            if kind in ("data_movement", "conversion"):
                source = operands[0] if used[0] is operands[0].array else inside(used[0])
                results = [self.casts.moved(primitive, params, source, used[1:], outs[0])]
            if kind == "conversion" and results:
                results = [self._converted(avals[0].dtype, operands[0], results[0])]
        if events.decided.listeners:
            given = arrays_of(operands)
            cost = product.flops(np.shape(outs[0])) if product else None
            place = where(self.outer, eqn)
            emit_decision(self.settings.policy, primitive.name, decision, given, used, outs, place, kept, cost, told)
        return list(map(inside, outs)) if results is None else results

    def _unruled(
        self, row: PrimitiveInfo, decision: Decision, operands: list[Value], weak: Sequence[bool], avals: Sequence[Any]
    ) -> Decision:
        """The decision for a primitive without a rule, by what it reads: a number is never rounded."""
        if not LOW.isdisjoint(map(dtype_of, avals)):
            return decision._replace(cast="promote")  # as it was written
        if decision.cast == "fp32":
            scaled = any(self.casts.scales(operands[index]) for index in row.scaled_by)
            return decision._replace(cast="promote") if scaled else decision
        computes = decision.operation in op_catalog.catalogue().may_be_low
        reads_number = computes and (any(weak) or any(map(Value.is_number, operands)))
        return decision._replace(cast="fp32") if reads_number else decision

    def _kept(self, operands: list[Value], eqn: Any, after_gradients: bool) -> str:
        """Why a contraction runs as it was written, whatever the policy says; empty if it does not."""
        asked = request(eqn, self.settings.low)
        if asked:
            return asked
        if after_gradients:
            return "it follows the gradients of the step: the optimizer's own"
        for value, other in (operands[:2], operands[1::-1]):
            if value.facts.widened:
                return f"the program asks for float32: it widens an operand from {value.facts.widened}"
            if value.facts.selects and dtype_of(other.array) == F32:
                return "an operand is made from booleans: the product selects or counts float32 values"
        return ""

    def _written(
        self, decision: Decision, operands: list[Value], eqn: Any, weak: Sequence[bool], kept: str
    ) -> tuple[list[Any], dict[str, Any]]:
        """Operands and parameters of a contraction that runs as it was written, or as a rule of the user says."""
        if kept == FEW_SUMMED or (decision.from_user and not kept):
            used = self.casts.cast_operands("promote" if kept else decision.cast, operands, weak)
            return used, _result_like(used[0], eqn.params, avals_of(eqn))
        return self.cast_to_avals(operands, avals_of(eqn)), eqn.params

    def _converted(self, given: Any, operand: Value, result: Value) -> Value:
        """The result of an explicit conversion from the dtype `given`, with what the conversion says of it."""
        if given == np.bool_:
            return dataclasses.replace(result, facts=result.facts._replace(selects=True))
        if given != F32 and is_castable(given) and dtype_of(result.array) == F32 and not operand.facts.weight:
            return dataclasses.replace(result, facts=result.facts._replace(widened=str(given)))
        return result

    def _contract(
        self, eqn: Any, operands: list[Value], avals: Sequence[Any], product: Contraction, f32_output: bool
    ) -> tuple[list[Any], Value]:
        low, primitive, params = self.settings.low, eqn.primitive, eqn.params
        masters = [value.array if value.is_weight() else None for value in operands[:2]]
        given = arrays_of(operands)
        # The contraction itself rounds float32 operands; a copy is for its derivative and for the next reader.
        runs_now = not events.decided.listeners and compat.runs_now(given)
        used = given[:2]
        if not runs_now:
            used = [v.array if dtype_of(v.array) == low else self.casts.low_copy(v) for v in operands[:2]]
        # The user asked for a float32 result if the program contracts operands that are low without autocast.
        requested = params.get("preferred_element_type") == F32 and F32 not in map(dtype_of, avals[:2])
        values = [*used, *given[2:]]
        out = F32 if f32_output or requested else low
        passed = (None, None) if runs_now else (masters[0], masters[1])
        result = contract_low(primitive, values, passed, params, low=low, out=out)
        if out != low:
            return values, Value(result)
        return values, Value(result, Facts(axes=product.axes((masters[0] is not None, masters[1] is not None))))

    def _inside(
        self, decision: Decision, operands: list[Value], eqn: Any, weak: Sequence[bool]
    ) -> tuple[list[Any], list[Any]]:
        """A primitive in float32, with a result in the dtype of its first operand that is no number."""
        arrays = arrays_of(operands)
        dtypes = list(map(castable_dtype, arrays))
        numbers = [self.casts.adopts_dtype(v, each) for v, each in zip(operands, weak, strict=True)]
        carried = [dtype for dtype, number in zip(dtypes, numbers, strict=True) if dtype is not None and not number]
        of = tuple(carried or filter(None, dtypes))
        _, result = cast_dtypes("fp32_inside", of, self.settings.low, F32)
        used = [v if d is None else jax.ShapeDtypeStruct((), F32) for v, d in zip(arrays, dtypes, strict=True)]

        def compute(*values: Any) -> list[Any]:
            outs = compat.bind(eqn.primitive, [cast(value, F32) for value in values], eqn.params)
            return [out if result is None else cast(out, result) for out in outs]

        return used, compute(*arrays) if result in (None, F32) else _recomputed(compute, arrays)

    def _cast(
        self, row: PrimitiveInfo, decision: Decision, operands: list[Value], weak: Sequence[bool], eqn: Any
    ) -> tuple[list[Any], dict[str, Any]]:
        kind, params = row.kind, eqn.params
        if kind == "fixed_dtype" or (kind is None and compat.sub_jaxprs(params)):
            return self.cast_to_avals(operands, avals_of(eqn)), params
        if kind == "conversion" or (kind == "data_movement" and not decision.from_user):
            return arrays_of(operands), params
        if kind == "independent" and decision.cast in ("keep", "promote"):
            used = arrays_of(operands)
        else:
            chosen: Cast = "fp32" if row.no_low else decision.cast
            used = self.casts.cast_operands(chosen, operands, weak, row, from_user=decision.from_user)
        name = row.dtype_parameter
        if is_castable(params.get(name)):
            dtypes = (dtype_of(value) for value in used)
            params = {**params, name: next((dtype for dtype in dtypes if is_castable(dtype)), params[name])}
        return used, params

    def cast_to_avals(self, operands: Sequence[Value], avals: Sequence[Any]) -> list[Any]:
        """The arrays of `operands` in the dtypes that the jaxpr was traced with."""
        pairs = zip(operands, avals, strict=True)
        return [self.casts.cast(v, aval.dtype) if is_castable(dtype_of(aval)) else v.array for v, aval in pairs]


@dataclasses.dataclass(frozen=True, slots=True)
class HigherOrderCall:
    """One primitive that contains jaxprs: the argument of its rule."""

    eqn: Any
    values: list[Value]
    """Its operands."""
    f32_outputs: FloatResults
    """For each result, whether it stays float32 if a contraction computes it; None for all."""
    interpreter: Interpreter
    after_gradients: bool = False
    """Whether it belongs to the optimizer of a training step."""

    @property
    def params(self) -> dict[str, Any]:
        """Its parameters."""
        params: dict[str, Any] = self.eqn.params
        return params

    @property
    def operands(self) -> list[Any]:
        """The arrays of its operands."""
        return arrays_of(self.values)

    def results(self, outs: Sequence[Any]) -> list[Value]:
        """The results, of which JAX may return some as they came in."""
        given = {id(value.array): value for value in self.values}
        return [given.get(id(out)) or inside(out) for out in outs]

    def bind(self, operands: Sequence[Any], *insides: Any, **changed: Any) -> list[Value]:
        """Binds the primitive with other operands, and others inside (`xla_amp.jax.rebind.bind`)."""
        return self.results(rebind.bind(self.eqn, operands, insides, **changed))

    def inner_interpreter(self, *, backward: bool = False, saves: bool | None = None) -> Interpreter:
        """An interpreter for a jaxpr that this primitive contains; `saves` None is that of the program around it."""
        transposed = any(map(compat.is_transpose_scope, compat.name_stack(self.eqn)))
        outer = self.interpreter
        backward = outer.backward or transposed or backward
        place = where(outer.outer, self.eqn) if events.decided.listeners else outer.outer
        settings = outer.settings
        if self.after_gradients != settings.after_gradients:
            settings = dataclasses.replace(settings, after_gradients=self.after_gradients)
        if not settings.as_written and compat.calls_numerical_function(self.eqn):
            settings = dataclasses.replace(settings, as_written=_NUMERICAL)
        scopes = (*outer.scopes, *compat.scopes(self.eqn)) if settings.policy.by_module else ()
        saves = outer.saves if saves is None else saves
        return Interpreter(settings, outer.rules, backward=backward, outer=place, scopes=scopes, saves=saves)

    def weight_flags(self) -> tuple[bool, ...]:
        """For each operand, whether it comes from outside the program."""
        return tuple(value.facts.weight for value in self.values)


HigherOrderRule: TypeAlias = Callable[[HigherOrderCall], list[Value]]
HigherOrderRules: TypeAlias = Mapping[str | None, HigherOrderRule]


def _recomputed(function: Callable[..., list[Any]], operands: Sequence[Any]) -> list[Any]:
    """``function(*operands)``, of which a backward pass stores only the operands, in their low dtype."""
    arrays = [index for index, value in enumerate(operands) if isinstance(value, jax.Array)]

    def with_arrays(*values: Any) -> list[Any]:
        given = dict(zip(arrays, values, strict=True))
        return function(*(given.get(index, value) for index, value in enumerate(operands)))

    outs: list[Any] = jax.checkpoint(with_arrays)(*(operands[index] for index in arrays))
    return outs


_NUMERICAL: Final = "a step of JAX's QR, samplers or special functions, which need float32"
_PICKED: Final = "only products read it: its operand is rounded instead"
_RESIDUAL: Final = "x + f(x): residual='low' lets it be low as f(x) is"


def _result_like(operand: Any, params: dict[str, Any], written: Sequence[Any]) -> dict[str, Any]:
    """Parameters of a contraction whose result has the dtype of its operands, unless the program asks for a wider one.

    `operand` is one of the two, as the contraction reads it; `written` are both, or their types, as written.
    """
    wanted = params.get("preferred_element_type")
    if not is_castable(wanted) or (wanted == F32 and all(dtype_of(each) != F32 for each in written[:2])):
        return params
    return {**params, "preferred_element_type": dtype_of(operand)}


def _why_fixed(decision: Decision, row: PrimitiveInfo) -> str:
    """Why a primitive cannot follow a rule; empty if it can."""
    fixed = row.kind in ("conversion", "fixed_dtype") and decision.cast not in ("ban", "keep")
    fixed = fixed or (row.no_low and decision.cast in LOW_CASTS)
    return f"it runs as it was written: {row.why}" if fixed else ""


def avals_of(eqn: Any) -> list[Any]:
    """Types of the operands of an equation, as the program was written."""
    return [atom.aval for atom in eqn.invars]


def _read(environment: dict[Any, Value], atom: Any) -> Value:
    """The value of a variable or constant; a constant array is a value from outside, as one of a closure is."""
    if not isinstance(atom, compat.Literal):
        return environment[atom]
    array = _literal(atom)
    if not np.ndim(array):
        return inside(array)
    return environment.setdefault(float32_regions.name(atom), outside(array))


def _read_as_written(environment: dict[Any, Any], atom: Any) -> Any:
    """The array of a variable or constant in the dtype that the program was traced with."""
    value = environment.get(float32_regions.name(atom))
    value = _literal(atom) if value is None else value
    dtype = dtype_of(atom.aval)
    return cast(value, dtype) if is_castable(dtype) else value


def _literal(atom: Any) -> Any:
    value = atom.val
    dtype = dtype_of(atom.aval)
    if dtype is None or isinstance(value, jax.Array) or (dtype_of(value) is not None and not is_castable(dtype)):
        return value
    return np.asarray(value, dtype)
