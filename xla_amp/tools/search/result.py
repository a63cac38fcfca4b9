"""The result of a search, for people and as a policy file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xla_amp.common import units
from xla_amp.common.tables import Table
from xla_amp.common.types import LowDtype
from xla_amp.errors import writing
from xla_amp.policy import Policy
from xla_amp.policy.policy import MEASURED
from xla_amp.tools.explain.page import Page, Report, Section
from xla_amp.tools.search import plans
from xla_amp.tools.search.candidates import Candidate
from xla_amp.tools.search.planner import Found, Plan


def not_met(found: Found) -> str:
    """The warning about a budget that no plan is within."""
    return f"the budget cannot be met: even with every candidate in float32 the error is {_shown(found.errors)}"


def _shown(errors: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {units.error(value)}" for name, value in errors.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult(Report):
    """The plan within the budget; ``print(result)`` shows it, `save` writes it as a policy file."""

    found: Found
    """Plan and measurements."""
    candidates: Sequence[Candidate]
    """What could run low, in the order of the program."""
    low: LowDtype
    in_effect: Plan
    """What of the plan has low operands or results; a norm beside float32 products has none."""
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

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        found = self.found
        return {
            "met": self.met,
            "low": self.low,
            "plan": sorted(found.plan),
            "in_effect": sorted(self.in_effect),
            "candidates": [each.name for each in self.candidates],
            "budget": dict(found.budget),
            "errors": dict(found.errors),
            "held_out": dict(found.held_out),
            "bounds": dict(found.bounds),
            "noise": dict(found.noise),
            "notes": list(found.notes),
            **dict(self.facts),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the policy file, which every front takes: ``autocast(device, policy="plan.toml")``.

        Raises:
            FileError: the file cannot be written.
        """
        measured = [f"{what}: {shown}" for what, shown in self._batches()]
        lines = [f"Written by a {MEASURED} of xla_amp.", self._answer(), *measured, *self.found.notes]
        text = plans.to_toml(self.policy, self._answer(), lines)
        with writing(path):
            Path(path).write_text(text, encoding="utf-8")

    def page(self) -> Page:
        """The report for people."""
        notes = self.found.notes
        return Page(
            f"{len(self.in_effect)} of {len(self.candidates)} candidates in {self.low}",
            self.facts,
            [
                Section(
                    "Is the error within the budget?", self._answer(), "low" if self.met else "risk", self._batches()
                ),
                Section("What should you know?", notes[0] if notes else "", "could", [(n, "") for n in notes[1:]]),
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

    def _batches(self) -> list[tuple[str, str]]:
        found = self.found
        return [
            ("on batches that the search did not use", _shown(found.held_out)),
            ("bound for one more batch", _shown(found.bounds)),
            ("float32 itself, operands off by one rounding", _shown(found.noise)),
        ]

    def _why(self, row: Sequence[Candidate]) -> str:
        if not any(each.name in self.in_effect or each.name not in self.found.plan for each in row):
            return "without effect: it gives the dtype of its operand, and that is float32"
        said = []
        for each in row:
            alone = self.found.alone.get(each.name)
            if alone is not None:
                shared = f", with {len(alone.plan) - 1} alike" if len(alone.plan) > 1 else ""
                said.append(f"{each.operation} alone in {self.low}{shared}: error of {_shown(alone.errors)}")
        everything = f"with everything in {self.low}: {self._answer().partition(': ')[2]}"
        return f"measured: {'; '.join(said) or everything}"

    def _table(self) -> Table:
        quantities = list(self.found.errors)
        columns = ("runs", "operation", "module", "count", *(f"{each} error" for each in quantities), "FLOP")
        rows = [
            (
                self.low if each.name in self.in_effect else "float32",
                each.operation,
                each.scope,
                each.count,
                *(self._alone(each, quantity) for quantity in quantities),
                each.flops or None,
            )
            for each in sorted(self.candidates, key=self._sensitivity)
        ]
        note = "" if self.found.alone else "No candidate was measured alone: everything low is within the budget."
        right = [f"{each} error" for each in quantities]
        return Table(columns=columns, rows=rows, right=right, optional=("FLOP", "count"), note=note)

    def _alone(self, each: Candidate, quantity: str) -> str:
        alone = self.found.alone.get(each.name)
        return "" if alone is None else units.error(alone.errors[quantity])

    def _sensitivity(self, each: Candidate) -> float:
        alone = self.found.alone.get(each.name)
        return -alone.load if alone is not None else 0.0
