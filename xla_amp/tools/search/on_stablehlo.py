"""`search` for StableHLO: the products of a program that must stay float32 on samples.

Errors are relative, of the worst result against the original program, as `comparison` measures them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from xla_amp.common import progress
from xla_amp.common.types import LowDtype
from xla_amp.errors import ModuleError, TargetError
from xla_amp.policy.policy import Policy
from xla_amp.stablehlo import ir, samples
from xla_amp.stablehlo.passes.autocast import Converted, convert
from xla_amp.stablehlo.passes.cast_graph import CastNode
from xla_amp.stablehlo.passes.module_paths import own_path
from xla_amp.stablehlo.passes.report import Achieved
from xla_amp.stablehlo.program import Program
from xla_amp.tools.inspect import comparison
from xla_amp.tools.search import Candidate, Found, Plan, SearchProgram, search

_QUANTITY: Final = "results"
_MOST: Final = 64
"""Largest number of candidates: more products than these are decided in runs of neighbours."""

Sample = Sequence[np.ndarray[Any, Any]]


class Planned(SearchProgram):
    """The program as `search` sees it: a candidate for each product, or for each run of neighbours.

    Args:
        program: as `io.load` gives it.
        policy: what it keeps in float32 stays there.
        low: the low dtype.
        given: arguments of one call, or a list of such tuples.
        keep_io: as for `autocast`.

    Raises:
        ModuleError: the samples do not fit, or the program has no result.
    """

    def __init__(self, program: Program, policy: Policy, low: LowDtype, given: Sequence[Any], *, keep_io: bool) -> None:
        import jax

        several = isinstance(given, list) and given and all(isinstance(each, tuple) for each in given)
        self._samples = [jax.tree.leaves(each) for each in (given if several else [given])]
        for sample in self._samples:
            samples.fitted(sample, program.module, "sample_inputs")
        self.batches = len(self._samples)
        self._low, self._original = low, _Original(program, self._samples)
        self._convert = functools.partial(convert, program, policy, low, keep_io=keep_io)
        self._products: list[tuple[int, Candidate]] = []
        self.first = self._convert(look=self._look)
        """The conversion in which everything is low that may be."""
        size = math.ceil(len(self._products) / _MOST) or 1
        runs = [self._products[start : start + size] for start in range(0, len(self._products), size)]
        self._nodes = {run[0][1].name: [number for number, _ in run] for run in runs}
        self.candidates = [run[0][1] for run in runs]
        self._last: tuple[Plan, comparison.Runs] | None = None

    def _look(self, nodes: Sequence[CastNode]) -> None:
        for number, node in enumerate(nodes):
            if node.low and node.colour == "allow" and node.index is None:
                scope, operation = own_path(node.operation) or "", node.op_class.name if node.op_class else ""
                self._products.append((number, Candidate(name=f"{number}", scope=scope, operation=operation)))

    def within(self, max_error: float | None) -> Converted:
        """The program with as few products in float32 as bring the results on all samples within `max_error`.

        None: that let them be finite wherever they were.  With an error and two samples or more the last quarter only
        checks the result, as in `xla_amp.jax.search`.

        Raises:
            TargetError: not even all products in float32 do.
            ModuleError: the program cannot be run on one device.
        """
        held_out = 0 if self.batches == 1 or max_error is None else None
        found = search(self, budget={_QUANTITY: max_error or sys.float_info.max}, held_out=held_out)
        converted = self._converted(found.plan, found)
        achieved = self._original.measure(comparison.Runs(converted.module))
        if not found.met and max_error is not None:
            raise TargetError(
                f"autocast(max_error={max_error:g}): the achieved error is {achieved.error:.2g} "
                f"({achieved.rounding:.2g} by one rounding of the samples)"
            )
        return dataclasses.replace(converted, achieved=achieved)

    def evaluate(self, plan: Plan, batch: int) -> Mapping[str, float]:
        """The error of the plan on one sample."""
        if self._last is None or self._last[0] != plan:
            self._last = plan, comparison.Runs(self._converted(plan).module)
        return {_QUANTITY: self._original.measure(self._last[1], [batch]).error}

    def _converted(self, plan: Plan, found: Found | None = None) -> Converted:
        """The program of a plan; with `found` reasons have the measured errors."""
        kept = self._nodes.keys() - plan
        return self._convert(
            keep={node: self._why(name, found) for name in kept for node in self._nodes[name]}
        ).converted

    def _why(self, name: str, found: Found | None) -> str:
        if found is None:
            return "not in the plan"
        error, limit = found.alone[name].errors[_QUANTITY], found.budget[_QUANTITY]
        wrong = f"wrong by {error:.2g}" if error < math.inf else "not finite"
        rest = f"accepted is {limit:.2g}" if limit < sys.float_info.max else "beside others not finite"
        return f"sample inputs: with nothing else in {self._low} the results are {wrong}, {rest}"


class _Original:
    """The results of a program on samples, which the errors of conversions are against."""

    def __init__(self, program: Program, given: Sequence[Sample]) -> None:
        self._samples, self._module = given, program.module
        if not ir.signature(program.module).outputs:
            raise ModuleError("the program gives no result: no error can be measured")
        self._runs = comparison.Runs(program.module)
        self._names = comparison.result_names(program.module)
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
        """Whether each result is only rounding error or NaN, on some sample; none is if all are."""
        changes = [self._results(number)[1] for number in range(len(self._samples))]
        return comparison.only_rounding(
            [math.inf if math.isnan(each) else each for each in of_one] for of_one in zip(*changes, strict=True)
        )

    def _results(self, number: int) -> tuple[list[Any], list[float]]:
        if number not in self._known:
            sample = samples.fitted(self._samples[number], self._module)
            self._known[number] = self._runs(sample), self._runs.roundings(sample)
        return self._known[number]


def _error(error: comparison.Error, noise: bool) -> float:
    if error.nonfinite or math.isnan(error.relative):
        return math.inf
    return 0.0 if noise else min(error.relative, sys.float_info.max)  # of finite numbers, also where they should be 0
