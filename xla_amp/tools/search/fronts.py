"""What the searches of all fronts have in common around `search`: limits, progress, the warning, the result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from xla_amp import events
from xla_amp.errors import SearchError
from xla_amp.events import DecisionRecord
from xla_amp.report.progress import counting
from xla_amp.tools.search.candidates import running_low
from xla_amp.tools.search.measurements import Plan, Program
from xla_amp.tools.search.planner import search
from xla_amp.tools.search.rates import Rates
from xla_amp.tools.search.result import SearchResult, not_met
from xla_amp.types import LOW_DTYPES, LowDtype


class Measured(Program, Protocol):
    """A program whose plans can also be estimated and timed."""

    @property
    def quantities(self) -> Sequence[str]:
        """What is measured; a budget without a name is for the first."""

    def records(self, plan: Plan | None) -> Sequence[DecisionRecord]:
        """The forward operations of a run."""

    def estimate(self, plan: Plan, rates: Rates) -> float:
        """Estimated seconds of one run of `plan`."""

    def time(self, plan: Plan) -> float:
        """Median seconds of one run of `plan` on this machine."""


def check_low(low: str) -> None:
    """Raises SearchError for a dtype that is no low one."""
    if low not in LOW_DTYPES:
        raise SearchError(f"low={low!r}: expected one of {', '.join(LOW_DTYPES)}")


def searched(
    program: Measured,
    rates: Rates,
    *,
    low: LowDtype,
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
        low: the low dtype.
        budget: of the user.
        held_out: of the user.
        budget_seconds: of the user.
        journal: of the user.
        target: of the user; None times the plan here.
        device: where the program runs, for the report.
    """
    with counting("precision search") as progress:
        found = search(
            program,
            budget=dict(budget) if isinstance(budget, Mapping) else {program.quantities[0]: budget},
            held_out=held_out,
            journal=None if journal is None else os.fspath(journal),
            budget_seconds=budget_seconds,
            progress=progress,
        )
    if not found.met:
        events.warn(not_met(found))
    useful = frozenset(each.name for each in program.candidates if each.seconds > 0)
    shown = {"float32": Plan(), "all low": useful, "plan": found.plan}
    return SearchResult(
        found=found,
        candidates=program.candidates,
        low=low,
        in_effect=found.plan & running_low(program.records(found.plan)),
        target=rates.title,
        estimated={name: program.estimate(plan, rates) for name, plan in shown.items()},
        measured={name: program.time(plan) for name, plan in shown.items()} if target is None else {},
        facts=(("device", device), ("batches", str(program.batches)), ("rates", rates.source)),
    )
