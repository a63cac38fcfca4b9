"""The result of a search, for people and as a policy file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xla_amp.common.types import LowDtype
from xla_amp.errors import writing
from xla_amp.policy import Policy
from xla_amp.policy.policy import MEASURED
from xla_amp.report import units
from xla_amp.report.document import Column, Document, Finding, Row, Table
from xla_amp.report.shown import Shown
from xla_amp.tools.search import plans
from xla_amp.tools.search.candidates import Candidate
from xla_amp.tools.search.measurements import Plan
from xla_amp.tools.search.planner import Assessment, Found


def not_met(found: Found) -> str:
    """The warning about a budget that no plan is within."""
    errors = ", ".join(f"{name} {units.error(value)}" for name, value in found.errors.items())
    return f"the budget cannot be met: even with every candidate in float32 the error is {errors}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult(Shown):
    """The cheapest plan within the budget; ``print(result)`` shows it, `save` writes it as a policy file."""

    found: Found
    """Plan and measurements."""
    candidates: Sequence[Candidate]
    """What could run low, in the order of the program."""
    low: LowDtype
    in_effect: Plan
    """What of the plan has low operands or results; a norm beside float32 products has none."""
    target: str
    """The machine that the estimates are for."""
    estimated: Mapping[str, float | None]
    """Estimated seconds of one run in ``float32``, with ``all low``, and of the ``plan``."""
    measured: Mapping[str, float | None]
    """The same, measured on this machine, if it was asked for."""
    facts: Sequence[tuple[str, str]] = ()

    def __repr__(self) -> str:
        errors = {name: float(f"{value:.2g}") for name, value in self.errors.items()}
        low = f"{len(self.found.plan)} of {len(self.candidates)} candidates low"
        return f"SearchResult(met={self.met}, {low}, errors={errors})"

    @property
    def met(self) -> bool:
        """Whether the measured errors are within the budget on all batches, those held out included."""
        return self.found.met

    @property
    def complete(self) -> bool:
        """Whether the search ended by itself, not by ``budget_seconds``."""
        return self.found.complete

    @property
    def errors(self) -> Mapping[str, float]:
        """Achieved relative errors, the largest over all batches, by quantity: ``{"loss": ..., "gradients": ...}``."""
        return self.found.errors

    @property
    def policy(self) -> Policy:
        """The plan as a policy, for ``autocast(policy=result.policy)``."""
        return plans.explained(self.found.plan, self.candidates, self.low, self._why)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        found = self.found
        return {
            "met": self.met,
            "complete": self.complete,
            "low": self.low,
            "plan": sorted(found.plan),
            "in_effect": sorted(self.in_effect),
            "candidates": [each.name for each in self.candidates],
            "budget": dict(found.budget),
            "errors": dict(found.errors),
            "held_out": dict(found.held_out),
            "bounds": dict(found.bounds),
            "noise": dict(found.noise),
            "target": self.target,
            "estimated": dict(self.estimated),
            "measured": dict(self.measured),
            "notes": list(found.notes),
            **dict(self.facts),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the policy file, which every front takes: ``autocast(device, policy="plan.toml")``.

        Raises:
            FileError: the file cannot be written.
        """
        text = plans.to_toml(self.policy, self._answer(), [f"Written by a {MEASURED} of xla_amp.", *self._lines()])
        with writing(path):
            Path(path).write_text(text, encoding="utf-8")

    def document(self) -> Document:
        """The report for people: `xla_amp.report` writes it as a page or as text."""
        found = self.found
        findings = [
            Finding("Is the error within the budget?", self._answer(), "low" if self.met else "risk", self._batches()),
            Finding("What does it save?", self._saves(), "low" if self.in_effect else "wide", self._slower()),
        ]
        if found.notes:
            findings.append(
                Finding("What should you know?", found.notes[0], "could", tuple((n, "") for n in found.notes[1:]))
            )
        return Document(
            title=f"{len(self.in_effect)} of {len(self.candidates)} candidates in {self.low}",
            kind="search",
            facts=(("target", self.target), *self.facts),
            findings=tuple(findings),
            tables=(self._table(),),
        )

    def _answer(self) -> str:
        budget = self.found.budget
        parts = [
            f"{name} {units.error(value)}" + (f" of {units.error(budget[name])}" if name in budget else "")
            for name, value in self.errors.items()
        ]
        return f"{'yes' if self.met else 'no'}: achieved error of {', '.join(parts)}"

    def _batches(self) -> tuple[tuple[str, str], ...]:
        found = self.found
        shown = [
            ("on batches that the search did not use", found.held_out),
            ("bound for one more batch", found.bounds),
            ("float32 itself, operands off by one rounding", found.noise),
        ]
        return tuple((what, ", ".join(f"{n} {units.error(v)}" for n, v in values.items())) for what, values in shown)

    def _saves(self) -> str:
        if not self.in_effect:
            return "nothing: every candidate runs in float32"
        said = [f"estimated {self._times(self.estimated)}"]
        if any(value is not None for value in self.measured.values()):
            said.append(f"measured here {self._times(self.measured)}")
        return "; ".join(said)

    def _slower(self) -> tuple[tuple[str, str], ...]:
        wide, plan = self.measured.get("float32"), self.measured.get("plan")
        if not self.in_effect or wide is None or plan is None or plan < wide:
            return ()
        return (("measured, it is not faster than float32: the estimates knew no casts and no overheads", ""),)

    def _times(self, seconds: Mapping[str, float | None]) -> str:
        return ", ".join(f"{name} {units.time(value)}" for name, value in seconds.items() if value is not None)

    def _lines(self) -> list[str]:
        return [
            self._answer(),
            *(f"{what}: {shown}" for what, shown in self._batches()),
            self._saves(),
            *self.found.notes,
        ]

    def _why(self, row: Sequence[Candidate]) -> str:
        if not any(map(self._has_effect, row)):
            return "without effect: it gives the dtype of its operand, and that is float32; saves nothing"
        saved = units.time(abs(sum(each.seconds for each in row)))
        said = []
        for each in row:
            alone = self.found.alone.get(each.name)
            if alone is not None:
                shared = f", with {len(alone.plan) - 1} alike" if len(alone.plan) > 1 else ""
                errors = ", ".join(f"{name} {units.error(value)}" for name, value in alone.errors.items())
                said.append(f"{each.operation} alone in {self.low}{shared}: error of {errors}")
        if not said:
            said = (
                [f"with all that saves time in {self.low}: {self._answer().partition(': ')[2]}"]
                if self._all_low()
                else ["not measured alone"]
            )
        verb = "saves" if sum(each.seconds for each in row) >= 0 else "in the low dtype would lose"
        return f"measured: {'; '.join(said)}; low {verb} {saved}"

    def _has_effect(self, each: Candidate) -> bool:
        """Whether low would save anything: a norm that the plan names stays float32 beside float32 products."""
        return each.name in self.in_effect or each.name not in self.found.plan

    def _all_low(self) -> bool:
        return all(each.name in self.found.plan for each in self.candidates if each.seconds > 0)

    def _table(self) -> Table:
        quantities = list(self.found.errors)
        columns = (
            Column("runs", meaning="What the plan decides"),
            Column("operation"),
            Column("module", "scope", meaning="The layer, as a rule names it"),
            Column("count", "count", sum=True),
            *(
                Column(f"{each} error", "error", meaning=f"Relative error of the {each} with only this low")
                for each in quantities
            ),
            Column("saves", "seconds", sum=True, meaning=f"Estimated time on {self.target}, forward and backward pass"),
            Column("bytes", "bytes", sum=True, meaning="Bytes that it saves"),
            Column("FLOP", "flops", sum=True),
        )
        return Table(
            title="Layers, the most sensitive first",
            columns=columns,
            rows=tuple(self._row(each, quantities) for each in sorted(self.candidates, key=self._sensitivity)),
            ranked=True,
            note="" if self.found.alone else "No candidate was measured alone: everything low is within the budget.",
        )

    def _sensitivity(self, each: Candidate) -> float:
        alone = self.found.alone.get(each.name)
        return -alone.load if alone is not None else 0.0

    def _row(self, each: Candidate, quantities: Sequence[str]) -> Row:
        alone: Assessment | None = self.found.alone.get(each.name)
        errors = [None if alone is None else alone.errors[name] for name in quantities]
        low = each.name in self.in_effect
        saves = (each.seconds, each.bytes) if self._has_effect(each) else (None, None)
        cells = (
            self.low if low else "float32",
            each.operation,
            each.scope,
            each.count,
            *errors,
            *saves,
            each.flops or None,
        )
        return Row(cells, "low" if low else "wide")
