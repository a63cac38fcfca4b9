"""The result of a search, for people and as a policy file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from xla_amp.common import units
from xla_amp.common.tables import Table
from xla_amp.common.types import LowDtype
from xla_amp.errors import writing
from xla_amp.policy import Policy
from xla_amp.policy.policy import MEASURED
from xla_amp.tools.explain.page import Page, Report, Section
from xla_amp.tools.search import plans
from xla_amp.tools.search.planner import Candidate, Found


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
