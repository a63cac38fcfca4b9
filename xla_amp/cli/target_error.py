"""The error that a converted program has on samples, and the conversion that stays within one.

Errors are relative, of the worst result against the original program, as `comparison` measures them.  To stay within an
error, `xla_amp.tools.search` decides which products run low, from measurements of whole programs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from xla_amp.common import progress
from xla_amp.common.types import LowDtype
from xla_amp.errors import ModuleError
from xla_amp.policy.policy import Policy
from xla_amp.stablehlo import ir, samples
from xla_amp.stablehlo.passes import calibration
from xla_amp.stablehlo.passes.autocast import Conversion, Converted, convert, warn_of_rules
from xla_amp.stablehlo.passes.cast_graph import CastNode
from xla_amp.stablehlo.passes.module_paths import own_path
from xla_amp.stablehlo.passes.propagation import Propagation
from xla_amp.stablehlo.passes.report import emit_events
from xla_amp.stablehlo.program import Program
from xla_amp.tools.inspect import comparison, names
from xla_amp.tools.search import Candidate, Found, Plan, SearchProgram, search

_QUANTITY: Final = "results"
_MOST: Final = 64
"""Largest number of candidates: more products than these are decided in runs of neighbours."""

Sample = Sequence[np.ndarray[Any, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Achieved:
    """Errors of a converted program."""

    samples: tuple[tuple[float, str], ...]
    """For each sample the error of the worst result, and its name."""
    rounding: float
    """What one rounding of the samples changes in the program as it was, the worst of the results and samples."""
    not_judged: tuple[str, ...] = ()
    """Results that are rounding errors in float32 already; they only count if they become infinite or NaN."""

    @property
    def error(self) -> float:
        """The worst."""
        return max(error for error, _ in self.samples)


class Original:
    """The results of a program on samples, which the errors of conversions are against."""

    def __init__(self, program: Program, given: Sequence[Sample]) -> None:
        self._samples, self._module = list(given), program.module
        if not ir.signature(program.module).outputs:
            raise ModuleError("the program gives no result: no error can be measured")
        self._runs = comparison.Runs(program.module)
        self._names = names.results(program.module)
        self._known: dict[int, tuple[list[Any], list[float]]] = {}

    def measure(self, converted: comparison.Runs, only: Sequence[int] | None = None) -> Achieved:
        """The errors of a conversion on each sample, or on those of the numbers `only`.

        Raises:
            ModuleError: a program cannot be run on one device, or the samples do not fit.
        """
        found, before = [], 0.0
        noisy = self._noisy()
        for number in range(len(self._samples)) if only is None else only:
            progress.tell("measuring the achieved error", number, len(self._samples))
            exact, roundings = self._results(number)
            errors = map(comparison.measure, converted(self._samples[number]), exact)
            judged = [(_error(each, noise), n) for each, noise, n in zip(errors, noisy, self._names, strict=True)]
            found.append(max(judged, default=(0.0, "no result")))
            before = max([before, *(each for each, noise in zip(roundings, noisy, strict=True) if not noise)])
        skipped = tuple(name for name, noise in zip(self._names, noisy, strict=True) if noise)
        return Achieved(samples=tuple(found), rounding=before, not_judged=skipped)

    @functools.cache  # noqa: B019 - lives as long as one search
    def _noisy(self) -> list[bool]:
        """Whether each result is only rounding error, on some sample; none is if all are."""
        changes = [self._results(number)[1] for number in range(len(self._samples))]
        return comparison.only_rounding(zip(*changes, strict=True))

    def _results(self, number: int) -> tuple[list[Any], list[float]]:
        if number not in self._known:
            sample = samples.fitted(self._samples[number], self._module)
            self._known[number] = self._runs(sample), self._runs.roundings(sample)
        return self._known[number]


def _error(error: comparison.Error, noise: bool) -> float:
    if error.nonfinite or math.isnan(error.relative):
        return math.inf
    return 0.0 if noise else error.relative


class Within(NamedTuple):
    """The result of `convert_within`."""

    converted: Converted
    achieved: Achieved
    found: Found


def convert_within(
    program: Program,
    policy: Policy,
    low: LowDtype,
    given: Sequence[Sample],
    target_error: float,
    *,
    keep_io: bool = True,
    strict: bool = False,
) -> Within:
    """Converts `program` so that the results on all samples are within `target_error`, with as many low products.

    Of two samples or more the last quarter only checks the result, as in `xla_amp.jax.search`.

    Args:
        program: as `io.load` gives it.
        policy: what it keeps in float32 stays there.
        low: the low dtype.
        given: arguments of one call each.
        target_error: largest accepted error of a result.
        keep_io: as for `autocast`.
        strict: as for `autocast`.

    Raises:
        ModuleError: the program cannot be run on one device, or the samples do not fit.
    """
    planned = _Planned(program, policy, low, given, keep_io)
    warn_of_rules(program, policy, planned.first, strict=strict)
    found = search(planned, budget={_QUANTITY: target_error}, held_out=0 if len(given) == 1 else None)
    converted = planned.converted(found.plan, found)
    emit_events(converted.report)
    return Within(converted, planned.original.measure(comparison.Runs(converted.module)), found)


class _Planned(SearchProgram):
    """The program as `search` sees it: a candidate for each product, or for each run of neighbours."""

    def __init__(self, program: Program, policy: Policy, low: LowDtype, given: Sequence[Sample], keep_io: bool) -> None:
        self.batches = len(given)
        self._program, self._policy, self._low, self._keep_io = program, policy, low, keep_io
        self._samples = list(given)
        self.original = Original(program, given)
        self._flagged: dict[int, str] = {}
        """Number of a node -> why the samples keep it in float32."""
        self._products: list[tuple[int, Candidate]] = []
        self.first = self._convert(self._look)
        size = math.ceil(len(self._products) / _MOST) or 1
        runs = [self._products[start : start + size] for start in range(0, len(self._products), size)]
        self._nodes = {run[0][1].name: frozenset(number for number, _ in run) for run in runs}
        self.candidates = [run[0][1] for run in runs]
        self._last: tuple[Plan, comparison.Runs] | None = None

    def evaluate(self, plan: Plan, batch: int) -> Mapping[str, float]:
        """The error of the plan on one sample."""
        if self._last is None or self._last[0] != plan:
            self._last = plan, comparison.Runs(self.converted(plan).module)
        return {_QUANTITY: self.original.measure(self._last[1], [batch]).error}

    def converted(self, plan: Plan, found: Found | None = None) -> Converted:
        """The program of a plan; with `found` reasons have the measured errors."""
        reasons = dict(self._flagged)
        for name, numbers in self._nodes.items():
            if name not in plan:
                reasons.update(dict.fromkeys(numbers, self._why(name, found)))
        return self._convert(lambda _, propagation: _by_number(propagation, reasons)).converted

    def _why(self, name: str, found: Found | None) -> str:
        if found is None or name not in found.alone:
            return "target error: not within it with everything low"
        return (
            f"target error: with nothing else in {self._low} the results are wrong by "
            f"{found.alone[name].errors[_QUANTITY]:.2g}; the target is {found.budget[_QUANTITY]:.2g}"
        )

    def _convert(self, keep: Callable[[ir.MlirModule, Propagation], Callable[[CastNode], str]]) -> Conversion:
        return convert(self._program, self._policy, self._low, keep_io=self._keep_io, keep=keep)

    def _look(self, copied: ir.MlirModule, propagation: Propagation) -> Callable[[CastNode], str]:
        # The first conversion: what overflows on the given, and the products.
        reasons = calibration.keep_reasons(copied, propagation, self._low, list(map(tuple, self._samples)), math.inf)
        for number, node in enumerate(propagation.nodes):
            if why := reasons(node):
                self._flagged[number] = why
            elif node.low and node.colour == "allow" and node.index is None:
                scope, operation = own_path(node.operation) or "", node.op_class.name if node.op_class else ""
                self._products.append((number, Candidate(name=f"{number}", scope=scope, operation=operation)))
        return reasons


def _by_number(propagation: Propagation, reasons: Mapping[int, str]) -> Callable[[CastNode], str]:
    by_node = {id(propagation.nodes[number]): why for number, why in reasons.items()}
    return lambda node: by_node.get(id(node), "")
