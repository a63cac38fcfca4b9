"""What the searches of all fronts have in common around `search`: limits, progress, the warning, the result."""

from __future__ import annotations

import abc
import math
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
from xla_amp.tools.search.planner import Plan, SearchProgram, search
from xla_amp.tools.search.result import SearchResult, shown

Array: TypeAlias = npt.NDArray[np.float32]
Quantities: TypeAlias = dict[str, list[Array]]
"""What a run gives: ``loss`` and ``gradients``, or ``output``."""


class MeasuredProgram(SearchProgram):
    """A program whose plans run in a framework and are compared with float32.

    A front gives `run` and `records`; quantities (``loss``, ``gradients``, ``output``) are lists of
    float32 arrays on the host.
    """

    overflow_finder: str
    """The call that finds a nonfinite value, for the message."""

    def __init__(self, low: LowDtype, batches: int) -> None:
        if low not in LOW_DTYPES:
            raise SearchError(f"low={low!r}: expected one of {', '.join(LOW_DTYPES)}")
        self.low: LowDtype = low
        self.batches = batches
        self._references: dict[int, Quantities] = {}

    @abc.abstractmethod
    def run(self, batch: int, plan: Plan | None, *, region: bool = True) -> Quantities:
        """What the program computes on one batch; plan None: all that can is low; without a region float32."""

    @abc.abstractmethod
    def records(self, plan: Plan | None, *, region: bool = True) -> Sequence[DecisionRecord]:
        """The decisions about the forward operations of a run; without a region there are none."""

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
                if not all(np.isfinite(part).all() for part in parts):
                    raise SearchError(
                        f"batch {batch}: the {name} is not finite in float32; {self.overflow_finder} finds where"
                    )
            self._references[batch] = found
        return self._references[batch]

    def evaluate(self, plan: Plan, batch: int) -> dict[str, float]:
        """Relative errors of `plan` on one batch."""
        found = self.run(batch, plan)
        return {name: relative_error(found[name], parts) for name, parts in self.reference(batch).items()}


def relative_error(found: Sequence[Array], reference: Sequence[Array]) -> float:
    """Relative error of arrays as one vector."""
    if not all(np.isfinite(each).all() for each in found):
        return math.inf
    given, right = (
        np.concatenate([np.ravel(each) for each in arrays], dtype=np.float64) for arrays in (found, reference)
    )
    difference, norm = np.linalg.norm(given - right), np.linalg.norm(right)
    return float(difference / norm) if norm else (math.inf if difference else 0.0)


def searched(program: MeasuredProgram, *, budget: float | Mapping[str, float], device: str) -> SearchResult:
    """Searches, and warns if the budget is not met."""
    if own := program.records(None, region=False):
        raise SearchError(
            f"the program opens an autocast region (policy {own[0].policy}), whose rules would hide those of the plan: "
            "take it out, search opens one around the program"
        )
    program.candidates = plans.from_records(program.records(None))
    with progress.shown("precision search", first=3):
        found = search(
            program,
            budget=dict(budget) if isinstance(budget, Mapping) else {next(iter(program.reference(0))): budget},
        )
    if not found.met:
        events.warn(
            f"the budget cannot be met: even with every candidate in float32 the error is {shown(found.errors)}"
        )
    facts = {"device": device, "batches": str(program.batches)}
    return SearchResult(found=found, candidates=program.candidates, low=program.low, facts=facts)
