"""What the searches of all fronts have in common around `search`: limits, progress, the warning, the result."""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from xla_amp.common import events, progress
from xla_amp.common.events import DecisionRecord
from xla_amp.common.types import LOW_DTYPES, LowDtype
from xla_amp.errors import SearchError
from xla_amp.policy import Policy
from xla_amp.tools.search import plans
from xla_amp.tools.search.candidates import from_records, running_low, seconds
from xla_amp.tools.search.measurements import Plan, SearchProgram, digest
from xla_amp.tools.search.planner import search
from xla_amp.tools.search.rates import Rates
from xla_amp.tools.search.result import SearchResult, not_met

Array: TypeAlias = npt.NDArray[np.float32]
Quantities: TypeAlias = dict[str, list[Array | None]]
"""What a run gives: ``loss`` and ``gradients``, or ``output``."""


class MeasuredProgram(SearchProgram):
    """A program whose plans run in a framework, are compared with float32, estimated and timed.

    A front gives `run`, `records`, `noise` and `time`; quantities (``loss``, ``gradients``, ``output``) are lists of
    float32 arrays on the host, None for a gradient that is missing.
    """

    overflow_finder: str
    """The call that finds a nonfinite value, for the message."""

    def __init__(self, low: LowDtype, batches: int) -> None:
        self.low: LowDtype = low
        self.batches = batches
        self._references: dict[int, Quantities] = {}

    @abc.abstractmethod
    def run(self, batch: int, plan: Plan | None, *, region: bool = True) -> Quantities:
        """What the program computes on one batch; plan None: all that can is low; without a region float32."""

    @abc.abstractmethod
    def records(self, plan: Plan | None) -> Sequence[DecisionRecord]:
        """The forward operations of a run."""

    @abc.abstractmethod
    def time(self, plan: Plan) -> float:
        """Median seconds of one run of `plan` on this machine, with its backward pass."""

    @property
    def has_gradients(self) -> bool:
        """Whether a run has a backward pass."""
        return "gradients" in self.reference(0)

    @property
    def quantities(self) -> tuple[str, ...]:
        """What is measured; a budget without a name is for the first."""
        return tuple(self.reference(0))

    def find_candidates(self, records: Sequence[DecisionRecord], rates: Rates, versions: Sequence[str]) -> None:
        """Sets `candidates` and `fingerprint` from the records of a run in which everything that can is low."""
        self.candidates = from_records(records, rates, low=self.low, backward=self.has_gradients)
        sums = [
            float(np.sum(part, dtype=np.float64)).hex()
            for index in range(self.batches)
            for parts in self.reference(index).values()
            for part in parts
            if part is not None
        ]
        self.fingerprint = digest(*map(repr, self.candidates), *sums, *versions, self.low)

    def policy(self, plan: Plan | None) -> Policy:
        """The policy of a plan; of None the one in which everything that can is low."""
        return plans.policy(plan or Plan(), () if plan is None else self.candidates, self.low)

    def reference(self, batch: int) -> Quantities:
        """What float32 computes on one batch.

        Raises:
            SearchError: a value is not finite.
        """
        if batch not in self._references:
            found = self.run(batch, None, region=False)
            for name, parts in found.items():
                if not all(np.isfinite(part).all() for part in parts if part is not None):
                    raise SearchError(
                        f"batch {batch}: the {name} is not finite in float32; {self.overflow_finder} finds where"
                    )
            self._references[batch] = found
        return self._references[batch]

    def errors(self, found: Quantities, batch: int) -> dict[str, float]:
        """Relative errors of quantities against float32 on the same batch."""
        return {name: relative_error(found[name], parts) for name, parts in self.reference(batch).items()}

    def evaluate(self, plan: Plan, batch: int) -> dict[str, float]:
        """Relative errors of `plan` on one batch."""
        return self.errors(self.run(batch, plan), batch)

    def estimate(self, plan: Plan, rates: Rates) -> float:
        """Estimated seconds of one run of `plan`."""
        return seconds(self.records(plan), self.candidates, rates, backward=self.has_gradients)


def relative_error(found: Sequence[Array | None], reference: Sequence[Array | None]) -> float:
    """Relative error of arrays as one vector; a missing gradient is zero."""
    difference = norm = 0.0
    for one, other in zip(found, reference, strict=True):
        if one is None and other is None:
            continue
        given, right = (np.float64(0) if each is None else each.astype(np.float64) for each in (one, other))
        if not np.isfinite(given).all():
            return math.inf
        difference += float(np.sum((given - right) ** 2))
        norm += float(np.sum(right**2))
    return math.sqrt(difference / norm) if norm else (math.inf if difference else 0.0)


def check_low(low: str) -> None:
    """Raises SearchError for a dtype that is no low one."""
    if low not in LOW_DTYPES:
        raise SearchError(f"low={low!r}: expected one of {', '.join(LOW_DTYPES)}")


def searched(
    program: MeasuredProgram,
    rates: Rates,
    *,
    budget: float | Mapping[str, float],
    held_out: int | None,
    budget_seconds: float | None,
    journal: str | os.PathLike[str] | None,
    target: str | None,
    device: str,
) -> SearchResult:
    """Searches, warns if the budget is not met, and estimates the plan.

    Args:
        program: with its candidates.
        rates: of the machine that the plan is for.
        budget: of the user.
        held_out: of the user.
        budget_seconds: of the user.
        journal: of the user.
        target: of the user; None times the plan here.
        device: where the program runs, for the report.
    """
    with progress.shown("precision search"):
        found = search(
            program,
            budget=dict(budget) if isinstance(budget, Mapping) else {program.quantities[0]: budget},
            held_out=held_out,
            journal=None if journal is None else os.fspath(journal),
            budget_seconds=budget_seconds,
        )
    if not found.met:
        events.warn(not_met(found))
    useful = frozenset(each.name for each in program.candidates if each.seconds > 0)
    shown = {"float32": Plan(), "all low": useful, "plan": found.plan}
    return SearchResult(
        found=found,
        candidates=program.candidates,
        low=program.low,
        in_effect=found.plan & running_low(program.records(found.plan)),
        target=rates.title,
        estimated={name: program.estimate(plan, rates) for name, plan in shown.items()},
        measured={name: program.time(plan) for name, plan in shown.items()} if target is None else {},
        facts=(("device", device), ("batches", str(program.batches)), ("rates", rates.source)),
    )
