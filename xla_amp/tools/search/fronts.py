"""What the searches of all fronts have in common around `search`: limits, progress, the warning, the result.

A `SearchResult` is for people, and for a policy file.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from xla_amp.common import events, progress, units
from xla_amp.common.events import DecisionRecord
from xla_amp.common.tables import Table
from xla_amp.common.types import LOW_DTYPES, LowDtype
from xla_amp.errors import SearchError, writing
from xla_amp.pages.page import Page, Report, Section
from xla_amp.planning import plans
from xla_amp.planning.planner import Candidate, Found, Plan, SearchProgram, search
from xla_amp.policy import Policy
from xla_amp.policy.policy import MEASURED
from xla_amp.stablehlo.measure.comparison import measure

Array: TypeAlias = npt.NDArray[np.float32]
Quantities: TypeAlias = dict[str, list[Array]]
"""What a run gives: ``loss`` and ``gradients``, or ``output``."""


def shown(errors: Mapping[str, float]) -> str:
    """Errors by quantity: ``loss 1.0e-03, gradients 2.0e-02``."""
    return ", ".join(f"{name} {units.error(value)}" for name, value in errors.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult(Report):
    """The plan within the budget; ``print(result)`` shows it, `save` writes it as a policy file."""

    found: Found
    """Plan and measurements."""
    candidates: Sequence[Candidate]
    """What could run low, in the order of the program."""
    low: LowDtype
    facts: Mapping[str, str]

    def __repr__(self) -> str:
        errors = {name: float(f"{value:.2g}") for name, value in self.errors.items()}
        low = f"{len(self.found.plan)} of {len(self.candidates)} candidates low"
        return f"SearchResult(met={self.met}, {low}, errors={errors})"

    @property
    def met(self) -> bool:
        """Whether the measured errors are within the budget on all batches, those held out included."""
        return self.found.met

    @property
    def errors(self) -> Mapping[str, float]:
        """Achieved relative errors, the largest over all batches, by quantity: ``{"loss": ..., "gradients": ...}``."""
        return self.found.errors

    @property
    def policy(self) -> Policy:
        """The plan as a policy, for ``autocast(policy=result.policy)``."""
        return plans.policy(self.found.plan, self.candidates, self.low, self._why)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the policy file, which every front takes: ``autocast(device, policy="plan.toml")``.

        Raises:
            FileError: the file cannot be written.
        """
        lines = [f"Written by a {MEASURED} of xla_amp.", self._answer(), self._checked()]
        text = plans.to_toml(self.found.plan, self.candidates, self.low, self._why, self._answer(), lines)
        with writing(path):
            Path(path).write_text(text, encoding="utf-8")

    def page(self) -> Page:
        """The report for people."""
        return Page(
            f"{len(self.found.plan)} of {len(self.candidates)} candidates in {self.low}",
            self.facts,
            [
                Section("Is the error within the budget?", self._answer(), [(self._checked(), "")]),
                Section("Layers, the most sensitive first", table=self._table()),
            ],
        )

    def _answer(self) -> str:
        budget = self.found.budget
        parts = [
            f"{name} {units.error(value)}" + (f" of {units.error(budget[name])}" if name in budget else "")
            for name, value in self.errors.items()
        ]
        return f"{'yes' if self.met else 'no'}: achieved error of {', '.join(parts)}"

    def _checked(self) -> str:
        return f"on the batches that only check the plan: {shown(self.found.held_out) or 'there are none'}"

    def _why(self, row: Sequence[Candidate]) -> str:
        said = []
        for each in row:
            alone = self.found.alone.get(each.name)
            if alone is not None:
                shared = f", with {alone.together - 1} alike" if alone.together > 1 else ""
                said.append(f"{each.operation} alone in {self.low}{shared}: error of {shown(alone.errors)}")
        everything = f"with everything in {self.low}: {self._answer().partition(': ')[2]}"
        return f"measured: {'; '.join(said) or everything}"

    def _table(self) -> Table:
        quantities = [f"{each} error" for each in self.found.errors]
        rows = []
        for each in sorted(self.candidates, key=self._sensitivity):
            alone = self.found.alone.get(each.name)
            errors = [""] * len(quantities) if alone is None else map(units.error, alone.errors.values())
            runs = self.low if each.name in self.found.plan else "float32"
            rows.append((runs, each.operation, each.scope, each.count, *errors, each.flops or None))
        columns = ("runs", "operation", "module", "count", *quantities, "FLOP")
        note = "" if self.found.alone else "No candidate was measured alone: everything low is within the budget."
        return Table(columns=columns, rows=rows, right=quantities, optional=("FLOP", "count"), note=note)

    def _sensitivity(self, each: Candidate) -> float:
        alone = self.found.alone.get(each.name)
        return -alone.load if alone is not None else 0.0


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
        return {name: _error(found[name], parts) for name, parts in self.reference(batch).items()}


def _error(found: Sequence[Array], reference: Sequence[Array]) -> float:
    """Relative error of arrays as one vector; infinite where one is not finite."""
    error = measure(*(np.concatenate([np.ravel(each) for each in arrays]) for arrays in (found, reference)))
    return math.inf if error.nonfinite else error.relative


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
