"""`search` where sample inputs decide: the products of a program that must stay float32 on samples.

Errors are relative, of the worst result against the original program, as `xla_amp.stablehlo.compare` measures them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from xla_amp.common import progress
from xla_amp.common.types import LowDtype
from xla_amp.errors import TargetError
from xla_amp.planning.planner import Candidate, Found, Plan, SearchProgram, search
from xla_amp.policy.policy import Policy
from xla_amp.stablehlo.conversion_report import Achieved
from xla_amp.stablehlo.converted import Converted
from xla_amp.stablehlo.measure import comparison, samples
from xla_amp.stablehlo.passes.cast_graph import CastNode
from xla_amp.stablehlo.passes.convert import convert
from xla_amp.stablehlo.program import Program
from xla_amp.stablehlo.scope_paths import own_path

_QUANTITY: Final = "max_error"
_MOST: Final = 64
"""Largest number of candidates: more products than these are decided in runs of neighbours."""


class Planned(SearchProgram):
    """The program as `search` sees it: a candidate for each product, or for each run of neighbours.

    `given` are the arguments of one call, or a list of such tuples; what `policy` keeps in float32 stays there.

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
        self._low, self._original = low, comparison.Reference(program.module, self._samples)
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
        limit = sys.float_info.max if max_error is None else max_error
        found = search(self, budget={_QUANTITY: limit}, held_out=held_out)
        converted = self._converted(found.plan, found)
        achieved = self._achieved(comparison.Runs(converted.module))
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
        return {_QUANTITY: max(map(_error, self._original.compare(self._last[1], batch)))}

    def _achieved(self, converted: comparison.Runs) -> Achieved:
        """The errors of a conversion on all samples."""
        found, rounding = [], 0.0
        for number in range(self.batches):
            progress.tell("measuring the achieved error", number, self.batches)
            outputs = self._original.compare(converted, number)
            found.append(max((_error(each), each.name) for each in outputs))
            rounding = max([rounding, *(each.rounding for each in outputs if each.judged and each.rounding > 0)])
        skipped = tuple(each.name for each in outputs if not each.judged)
        return Achieved(samples=tuple(found), rounding=rounding, not_judged=skipped)

    def _converted(self, plan: Plan, found: Found | None = None) -> Converted:
        """The program of a plan; with `found` reasons have the measured errors."""
        kept = self._nodes.keys() - plan
        return self._convert(
            wide={node: self._why(name, found) for name in kept for node in self._nodes[name]}
        ).converted

    def _why(self, name: str, found: Found | None) -> str:
        if found is None:
            return "not in the plan"
        error, limit = found.alone[name].errors[_QUANTITY], found.budget[_QUANTITY]
        wrong = f"wrong by {error:.2g}" if error < math.inf else "not finite"
        rest = f"accepted is {limit:.2g}" if limit < sys.float_info.max else "beside others not finite"
        return f"sample inputs: with nothing else in {self._low} the results are {wrong}, {rest}"


def _error(each: comparison.OutputError) -> float:
    if each.error.nonfinite or math.isnan(each.error.relative):
        return math.inf
    return min(each.error.relative, sys.float_info.max) if each.judged else 0.0  # of numbers that should be 0, too
