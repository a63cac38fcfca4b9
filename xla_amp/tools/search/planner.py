"""Search for the plan that keeps the fewest candidates in float32 while its measured errors stay within a budget.

1. Everything low.  If that is within the budget, nothing is given back.
2. Each candidate alone low, which is what it contributes; of large programs each kind of layer first, and its layers
   only where the kind matters.
3. Candidates get float32 back, those that contribute most first, until the errors of the whole are within the budget.
4. The plan on batches that the steps before have not seen; while it fails there, the next candidate gets float32 back.

Only plans whose errors were measured on every batch are returned.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from xla_amp.common import progress
from xla_amp.errors import SearchError
from xla_amp.tools.explain import paths
from xla_amp.tools.search.candidates import Candidate

Plan: TypeAlias = frozenset[str]
"""Names of the candidates that run low; the others run in float32."""

FEW: Final = 24
"""Up to this many candidates are measured one by one; more are grouped by kind of layer first."""
SMALL: Final = 0.25
"""A group whose error is at most this share of the budget is not split."""
CONFIDENCE: Final = 0.99
"""Of the bound on the error of one more batch, by which plans are judged."""


class SearchProgram(abc.ABC):
    """A program as a front gives it to `search`."""

    candidates: Sequence[Candidate] = ()
    """In the order of the program: an error of the first can reach the others."""
    batches: int
    """Number of batches."""

    @abc.abstractmethod
    def evaluate(self, plan: Plan, batch: int) -> Mapping[str, float]:
        """Relative errors of the program under `plan` against float32 on the same batch, by quantity (``loss``).

        A value that is finite in float32 only is an infinite error.
        """

    @abc.abstractmethod
    def noise(self) -> Mapping[str, float]:
        """The same errors of float32 itself with operands that differ by one rounding: no smaller error means much."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assessment:
    """Errors of one plan."""

    plan: Plan
    errors: Mapping[str, float]
    """Largest error over the batches, by quantity."""
    bounds: Mapping[str, float]
    """Bound for further batches."""
    load: float
    """Largest share of a budget that a bound takes; within the budget up to 1."""

    @property
    def fits(self) -> bool:
        """Whether it is within the budget."""
        return self.load <= 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The result of `search`."""

    plan: Plan
    """Names of the candidates that run low."""
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
    alone: Mapping[str, Assessment]
    """Candidate -> it alone, or with the equal layers of its `Assessment.plan`, low."""
    noise: Mapping[str, float]
    notes: Sequence[str]


def search(
    program: SearchProgram,
    *,
    budget: Mapping[str, float],
    held_out: int | None = None,
    confidence: float = CONFIDENCE,
) -> Found:
    """The plan with the fewest candidates in float32, those that contribute most, whose errors are within `budget`.

    Args:
        program: what to plan.
        budget: quantity -> largest accepted relative error, ``{"loss": 1e-3, "gradients": 1e-2}``.  Quantities that it
            does not name are measured and reported only; they must be finite.
        held_out: number of batches, the last ones, that only check the result; None is a quarter, at least one.
        confidence: of the bound on the error of one more batch, by which plans are judged.

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
    return _Search(program, budget, kept, confidence).run()


class _Search:
    def __init__(self, program: SearchProgram, budget: Mapping[str, float], held_out: int, confidence: float) -> None:
        self.candidates = {each.name: each for each in program.candidates}
        self.program = program
        self.budget = budget
        self.used = list(range(program.batches - held_out))
        self.kept = list(range(program.batches - held_out, program.batches))
        self.confidence = confidence
        self.measured: dict[tuple[Plan, int], Mapping[str, float]] = {}
        self.known: dict[Plan, Assessment] = {}
        self.alone: dict[str, Assessment] = {}
        self.notes: list[str] = []

    def run(self) -> Found:
        zero = self._assess(Plan())
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
        best = self._within_budget()
        return Found(
            plan=best.plan,
            errors=self._largest(best.plan, [*self.used, *self.kept]),
            bounds=best.bounds,
            held_out=self._largest(best.plan, self.kept),
            budget=dict(self.budget),
            met=self._holds(best.plan, [*self.used, *self.kept]),
            alone=self.alone,
            noise=noise,
            notes=tuple(self.notes),
        )

    def _within_budget(self) -> Assessment:
        everything = Plan(self.candidates)
        if self._assess(everything).fits and self._holds(everything, self.kept):
            return self.known[everything]
        units = sorted(self._units(), key=lambda unit: -self.known[unit].load)  # stable: upstream first

        def after(count: int) -> Assessment:
            return self._assess(everything.difference(*units[:count]))

        fails, fits = -1, len(units)
        while fits - fails > 1:
            middle = (fails + fits) // 2
            fails, fits = (fails, middle) if after(middle).fits else (middle, fits)
        if fits < len(units) and not self._holds(after(fits).plan, self.kept):
            self.notes.append("a plan failed on the held-out batches, so these decided, too")
        while fits < len(units) and not self._holds(after(fits).plan, self.kept):
            fits += 1
        return after(fits)

    def _units(self) -> list[Plan]:
        """Candidates that get float32 back together, each measured alone, in the order of the program."""
        single = [Plan({name}) for name in self.candidates]
        if len(single) <= FEW:
            return [self._note_alone(unit) for unit in single]
        kinds: dict[tuple[str, str], set[str]] = {}
        for name, each in self.candidates.items():
            kinds.setdefault((paths.pattern(each.scope), each.operation), set()).add(name)
        units: list[Plan] = []
        for kind in map(self._note_alone, map(Plan, kinds.values())):
            if len(kind) > 1 and self.known[kind].load > SMALL:
                units += [self._note_alone(unit) for unit in single if unit <= kind]
            else:
                units.append(kind)
        return units

    def _note_alone(self, unit: Plan) -> Plan:
        found = self._assess(unit)
        self.alone.update(dict.fromkeys(unit, found))
        return unit

    def _holds(self, plan: Plan, batches: Iterable[int]) -> bool:
        """Whether the measured errors are within the budget on each of `batches`."""
        found = [self._errors(plan, batch) for batch in batches]
        within = all(errors[name] <= limit for errors in found for name, limit in self.budget.items())
        return within and all(math.isfinite(value) for errors in found for value in errors.values())

    def _largest(self, plan: Plan, batches: Iterable[int]) -> dict[str, float]:
        measured = [self._errors(plan, batch) for batch in batches]
        return {name: max(each[name] for each in measured) for name in measured[0]}

    def _errors(self, plan: Plan, batch: int) -> Mapping[str, float]:
        if (plan, batch) not in self.measured:
            tried = f"{len(plan)} of {len(self.candidates)} low, batch {batch}"
            progress.tell(f"{len(self.measured)} measured, now {tried}")
            found = self.program.evaluate(plan, batch)
            self.measured[plan, batch] = {k: math.inf if math.isnan(v) else abs(float(v)) for k, v in found.items()}
        return self.measured[plan, batch]

    def _assess(self, plan: Plan) -> Assessment:
        if plan not in self.known:
            found = [self._errors(plan, batch) for batch in self.used]
            bounds = {name: bound([each[name] for each in found], self.confidence) for name in found[0]}
            load = max((bounds[name] / limit for name, limit in self.budget.items() if name in bounds), default=0.0)
            errors = self._largest(plan, self.used)
            if not all(map(math.isfinite, errors.values())):
                load = math.inf
            self.known[plan] = Assessment(plan=plan, errors=errors, bounds=bounds, load=load)
        return self.known[plan]


def bound(values: Sequence[float], confidence: float) -> float:
    """An upper bound for the error on one more batch, at `confidence`, from the errors on `values`' batches.

    It is the prediction limit of a normal sample, ``mean + t s sqrt(1 + 1/n)``, and at least the largest value.

    Example:
        >>> round(bound([1.0, 1.0, 1.0], 0.99), 3), round(bound([0.9, 1.0, 1.1], 0.99), 2)
        (1.0, 1.76)
    """
    worst = max(values)
    if len(values) < 2 or math.isinf(worst):
        return worst
    deviation = statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    return max(worst, statistics.fmean(values) + student(confidence, len(values) - 1) * deviation)


def student(confidence: float, freedom: int) -> float:
    """The quantile of Student's t distribution, by the expansion of Cornish and Fisher (Abramowitz, Stegun 26.7.5).

    Within 10 % for two degrees of freedom, and 1 % from five on, at the confidences of `search`.
    """
    z = statistics.NormalDist().inv_cdf(confidence)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
