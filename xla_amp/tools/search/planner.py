"""Search for the plan that saves the most time while its measured errors stay within a budget.

1. Everything low. If that is within the budget, nothing saves more.
2. Each candidate alone low; of large programs each kind of layer first, and its layers only where the kind matters.
3. The plan with the largest saving whose errors, added as independent ones, are within the budget; measured as a whole;
   while it is not within the budget, the candidates with the most error for their saving leave it, upstream first.
4. Candidates enter again, alone and in exchange for others, as long as the measured errors of the whole stay within.
5. The plan on batches that the steps before have not seen. If it fails there, these batches count too from then on.

Estimates choose what to measure next.  Only plans whose errors were measured on every batch are ever returned.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from xla_amp.common import progress
from xla_amp.errors import SearchError
from xla_amp.report import paths
from xla_amp.tools.search.measurements import Measurements, Plan, SearchProgram, bound, spread

FEW: Final = 24
"""Up to this many candidates are measured one by one; more are grouped by kind of layer first."""
SMALL: Final = 0.25
"""A group whose error is at most this share of the budget is not split, and its spread says nothing about others."""
EXCHANGES: Final = 4
"""Exchanges that step 4 tries, per candidate."""
CONFIDENCE: Final = 0.99
"""Of the bound on the error of one more batch, by which plans are judged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assessment:
    """Errors of one plan."""

    plan: Plan
    seconds: float
    """Estimated time that it saves."""
    errors: Mapping[str, float]
    """Largest error over the batches, by quantity."""
    bounds: Mapping[str, float]
    """Bound for further batches."""
    load: float
    """Largest share of a budget that a bound takes; within the budget up to 1."""
    complete: bool
    """Whether all batches were measured; the first error over the budget ends the measurement."""

    @property
    def fits(self) -> bool:
        return self.complete and self.load <= 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The result of `search`."""

    plan: Plan
    """Names of the candidates that run low."""
    seconds: float
    """Estimated time that it saves."""
    errors: Mapping[str, float]
    """Largest measured error over all batches, by quantity."""
    bounds: Mapping[str, float]
    """Bound for further batches."""
    held_out: Mapping[str, float]
    """Largest error on the batches that the search did not use."""
    budget: Mapping[str, float]
    met: bool
    """Whether the errors on all batches are within the budget. Only a float32 program that is not reproducible, or
    that autocast cannot keep in float32, makes it False."""
    complete: bool
    """Whether the search ended by itself; False when its time ended."""
    alone: Mapping[str, Assessment]
    """Candidate -> it alone, or with the equal layers of its `Assessment.plan`, low."""
    tried: Sequence[Assessment]
    """Every plan that was measured, in order."""
    noise: Mapping[str, float]
    notes: Sequence[str]
    spread: Mapping[str, float]
    """Quantity -> upper quartile of the relative spreads over batches of plans near the budget; none counts as less."""


class _OutOfTimeError(Exception):
    pass


def search(
    program: SearchProgram,
    *,
    budget: Mapping[str, float],
    held_out: int | None = None,
    confidence: float = CONFIDENCE,
    journal: str | None = None,
    budget_seconds: float | None = None,
) -> Found:
    """The plan that saves the most estimated time among those whose errors stay within `budget`.

    Args:
        program: what to plan.
        budget: quantity -> largest accepted relative error, ``{"loss": 1e-3, "gradients": 1e-2}``.  Quantities that it
            does not name are measured and reported only; they must be finite.
        held_out: number of batches, the last ones, that only check the result; None is a quarter, at least one.
        confidence: of the bound on the error of one more batch, by which plans are judged.
        journal: JSON lines file of the measurements; a search that was interrupted continues from it.
        budget_seconds: time to search; when it ends, the best plan so far is checked and returned.

    Raises:
        SearchError: the budget is not positive, names a quantity that is not measured, or there are too few batches.
    """
    for name, value in budget.items():
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise SearchError(f"budget {name} = {value!r}: expected a positive relative error, e.g. 1e-3")
    if not budget:
        raise SearchError('the budget names no quantity; expected e.g. {"loss": 1e-3}')
    kept = max(1, program.batches // 4) if held_out is None else held_out
    if kept < 1 or program.batches - kept < 2:
        raise SearchError(
            f"{program.batches} batches, {kept} of them held out: a search needs two or more for their spread, and one "
            "or more to check the plan on; give three or more different batches"
        )
    return _Search(program, budget, kept, confidence, journal, budget_seconds).run()


class _Search:
    def __init__(
        self,
        program: SearchProgram,
        budget: Mapping[str, float],
        held_out: int,
        confidence: float,
        journal: str | None,
        budget_seconds: float | None,
    ) -> None:
        self.candidates = {each.name: each for each in program.candidates}
        self.rank = {name: index for index, name in enumerate(self.candidates)}
        self.program = program
        self.budget = budget
        self.used = list(range(program.batches - held_out))
        self.kept = list(range(program.batches - held_out, program.batches))
        self.confidence = confidence
        self.measurements = Measurements(program, journal)
        self.deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
        self.known: dict[Plan, Assessment] = {}
        self.alone: dict[str, Assessment] = {}
        self.notes: list[str] = []
        self.spreads: dict[str, list[float]] = {}
        """Quantity -> the relative spread over batches of each plan that takes more than `SMALL` of the budget."""

    def run(self) -> Found:
        zero = self._assess(frozenset(), timed=False)
        missing = [name for name in self.budget if name not in zero.bounds]
        if missing:
            raise SearchError(
                f"the budget names {', '.join(missing)}; this program has {', '.join(zero.bounds) or 'nothing'}"
            )
        noise = dict(self.program.noise())
        for name, value in self.budget.items():
            if value < noise.get(name, 0):
                self.notes.append(
                    f"the budget for {name}, {value:.1e}, is below what one rounding of the operands "
                    f"changes in float32 ({noise[name]:.1e})"
                )
        complete = True
        try:
            self._explore()
        except _OutOfTimeError:
            complete = False
            self.notes.append("the time ended before the search did: a cheaper plan may exist")
        best = self._checked()
        return Found(
            plan=best.plan,
            seconds=best.seconds,
            errors=self._largest(best.plan, [*self.used, *self.kept]),
            bounds=best.bounds,
            held_out=self._largest(best.plan, self.kept),
            budget=dict(self.budget),
            met=all(self._within(best.plan, batch) for batch in (*self.used, *self.kept)),
            complete=complete,
            alone=self.alone,
            tried=tuple(self.known.values()),
            noise=noise,
            notes=tuple(self.notes),
            spread={name: self._typical(name) for name in zero.errors},
        )

    def _explore(self) -> None:
        useful = frozenset(name for name, each in self.candidates.items() if each.seconds > 0)
        if not useful or self._assess(useful).fits:
            return
        units = self._units(useful)
        self._judge_again()
        fitting = [unit for unit in units if self._assess(unit).fits]
        plan = self._back_off(fitting)
        self._improve(plan, fitting)
        self._judge_again()

    def _units(self, useful: Plan) -> list[Plan]:
        """Candidates that enter and leave a plan together, each measured alone."""
        single = [frozenset({name}) for name in self.candidates if name in useful]
        if len(single) <= FEW:
            for unit in single:
                self._note_alone(unit)
            return single
        kinds: dict[tuple[str, str], set[str]] = {}
        for name in useful:
            each = self.candidates[name]
            kinds.setdefault((paths.pattern(each.scope), each.operation), set()).add(name)
        units: list[Plan] = []
        for kind in sorted(map(frozenset, kinds.values()), key=self._saving, reverse=True):
            self._note_alone(kind)
            if len(kind) > 1 and self.known[kind].load > SMALL:
                members = sorted((frozenset({name}) for name in kind), key=self._first)
                for unit in members:
                    self._note_alone(unit)
                units += members
            else:
                units.append(kind)
        return units

    def _note_alone(self, unit: Plan) -> None:
        found = self._assess(unit)
        for name in unit:
            self.alone[name] = found

    def _back_off(self, units: Sequence[Plan]) -> Plan:
        """The first plan within the budget, from all `units` low."""
        factor, limit = 1.0, 1.0
        left = list(units)
        while chosen := self._knapsack(left, limit / factor):
            found = self._assess(frozenset[str]().union(*chosen))
            if found.fits:
                return found.plan
            expected = self._expected(chosen)
            if found.complete and math.isfinite(found.load) and expected > 0:
                factor = max(factor, found.load / expected)
            limit = min(limit, expected * factor * 0.999)
            if set(self._knapsack(left, limit / factor)) == set(chosen):  # units without an error of their own
                left.remove(min(chosen, key=self._first))
        return frozenset()

    def _knapsack(self, units: Iterable[Plan], limit: float) -> list[Plan]:
        """Units by error for their saving, while independent errors add up to at most `limit` budgets."""
        chosen, total = [], 0.0
        by_worth = sorted(units, key=lambda u: (self.known[u].load ** 2 / self._saving(u), -self._first(u)))
        for unit in by_worth:
            if total + self.known[unit].load ** 2 <= limit**2:
                chosen.append(unit)
                total += self.known[unit].load ** 2
        return chosen

    def _expected(self, units: Iterable[Plan]) -> float:
        return math.sqrt(sum(self.known[unit].load ** 2 for unit in units))

    def _improve(self, plan: Plan, units: Sequence[Plan]) -> None:
        """Adds units, and exchanges cheap ones for dear ones, while the measured plan fits."""
        plan = self._grown(plan, units)
        left = EXCHANGES * len(units)
        changed = True
        while changed and left > 0:
            changed = False
            for unit in sorted((u for u in units if not u <= plan), key=self._saving, reverse=True):
                for out in sorted((u for u in units if u <= plan), key=self._saving):
                    if self._saving(out) >= self._saving(unit) or left <= 0:
                        break
                    tried = (plan - out) | unit
                    if self._hopeless(tried):
                        continue
                    left -= tried not in self.known
                    if self._assess(tried).fits:
                        plan, changed = self._grown(tried, units), True
                        break
                if changed:
                    break

    def _grown(self, plan: Plan, units: Sequence[Plan]) -> Plan:
        for unit in sorted(units, key=self._saving, reverse=True):
            tried = plan | unit
            if tried != plan and not self._hopeless(tried) and self._assess(tried).fits:
                plan = tried
        return plan

    def _hopeless(self, plan: Plan) -> bool:
        """Whether a part of it does not fit: more that runs low seldom makes the error smaller."""
        return any(not found.fits and part <= plan for part, found in self.known.items())

    def _checked(self) -> Assessment:
        """The best plan that is within the budget on the batches that were held out, too."""
        unseen = True
        while True:
            best = max((each for each in self.known.values() if each.fits), key=self._worth, default=None)
            if best is None:
                return self.known[frozenset()]
            failed = [batch for batch in self.kept if not self._within(best.plan, batch)]
            if not failed:
                return best
            if unseen:
                unseen = False
                self.notes.append("a plan failed on the held-out batches, so these chose among the measured plans, too")
            shown = self.measurements.errors(best.plan, failed[0])
            load = max(shown[name] / limit for name, limit in self.budget.items())
            self.known[best.plan] = dataclasses.replace(best, load=max(load, math.nextafter(1, 2)))
            if best.plan:
                self._retreat(best.plan)
            else:
                return self.known[frozenset()]

    def _retreat(self, plan: Plan) -> None:
        """Measures `plan` without the part that has the largest error, for the next turn of `_checked`."""
        parts = {self.alone[name].plan for name in plan if name in self.alone} or {frozenset({n}) for n in plan}
        worst = max(parts, key=lambda p: (self.known[p].load if p in self.known else 0.0, -self._first(p)))
        self._assess(plan - worst, timed=False)

    def _worth(self, each: Assessment) -> tuple[float, int, float]:
        # Of equal savings the one that is low downstream: there are fewer values for its error to reach.
        return each.seconds, self._first(each.plan) if each.plan else 0, -each.load

    def _saving(self, unit: Plan) -> float:
        return math.fsum(self.candidates[name].seconds for name in unit)

    def _first(self, unit: Plan) -> int:
        return min(self.rank[name] for name in unit)

    def _within(self, plan: Plan, batch: int) -> bool:
        errors = self.measurements.errors(plan, batch)
        return all(errors[name] <= limit for name, limit in self.budget.items()) and all(
            map(math.isfinite, errors.values())
        )

    def _largest(self, plan: Plan, batches: Iterable[int]) -> dict[str, float]:
        measured = [self.measurements.errors(plan, batch) for batch in batches]
        return {name: max(each[name] for each in measured) for name in measured[0]}

    def _assess(self, plan: Plan, *, timed: bool = True) -> Assessment:
        if plan in self.known:
            return self.known[plan]
        measured: list[Mapping[str, float]] = []
        for batch in self.used:
            if timed and self.deadline is not None and time.monotonic() > self.deadline:
                raise _OutOfTimeError
            tried = f"{len(plan)} of {len(self.candidates)} low, batch {batch}"
            progress.tell(f"{self.measurements.run} measured, now {tried}")
            measured.append(self.measurements.errors(plan, batch))
            over = any(value > self.budget.get(name, math.inf) for name, value in measured[-1].items())
            if plan and (over or not all(map(math.isfinite, measured[-1].values()))):
                break
        found = self.known[plan] = self._judged(plan, measured)
        # What errs little often errs the same on every batch, which says nothing about plans near the budget.
        if plan and found.complete and SMALL < found.load < math.inf:
            for name in found.errors:
                self.spreads.setdefault(name, []).append(spread([each[name] for each in measured]))
        return found

    def _judge_again(self) -> None:
        """Judges the plans so far by the spread of all of them, which those before did not know."""
        for plan, found in self.known.items():
            if found.complete:
                self.known[plan] = self._judged(plan, [self.measurements.errors(plan, batch) for batch in self.used])
        self.alone = {name: self.known[found.plan] for name, found in self.alone.items()}

    def _typical(self, name: str) -> float:
        """The least spread that counts: of many plans the best is one whose errors differ little, if only by chance."""
        spreads = sorted(self.spreads.get(name, [0.0]))
        return spreads[len(spreads) * 3 // 4]

    def _judged(self, plan: Plan, measured: Sequence[Mapping[str, float]]) -> Assessment:
        errors = {name: max(each[name] for each in measured) for name in measured[0]}
        bounds = {
            name: bound([each[name] for each in measured], self.confidence, self._typical(name)) for name in errors
        }
        load = max((bounds[name] / limit for name, limit in self.budget.items() if name in bounds), default=0.0)
        if not all(map(math.isfinite, errors.values())):
            load = math.inf
        return Assessment(
            plan=plan,
            seconds=self._saving(plan) if plan else 0.0,
            errors=errors,
            bounds=bounds,
            load=load,
            complete=len(measured) == len(self.used),
        )
