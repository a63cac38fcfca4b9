"""Search for the plan that keeps the fewest candidates in float32 while its measured errors stay within a budget.

1. Everything low.  If that is within the budget, nothing is given back.
2. Each candidate low alone, which is what it contributes; equal layers together, and one by one where that matters.
3. Candidates get float32 back until the errors of the whole are within the budget: first those that contribute most,
   of which one that makes a value infinite is the first.
4. The plan on batches that the steps before have not seen; while it fails there, the next candidate gets float32 back.

Only plans whose errors were measured on every batch are returned.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from xla_amp.common import progress
from xla_amp.errors import SearchError
from xla_amp.pages import paths

Plan: TypeAlias = frozenset[str]
"""Names of the candidates that run low; the others run in float32."""

SMALL: Final = 0.25
"""Equal layers whose error together is at most this share of the budget are not measured one by one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Operations of one kind in one scope."""

    name: str
    """Pattern of a rule that reaches it: ``module:h.0.attn.linear``, or ``linear`` outside scopes."""
    scope: str = ""
    operation: str = ""
    flops: int = 0
    """Of the forward pass."""
    count: int = 1
    """Number of operations."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone:
    """What a candidate contributes."""

    errors: Mapping[str, float]
    """Largest error over the batches with nothing else low, by quantity."""
    load: float
    """Largest share of the budget that one of them takes."""
    together: int
    """Number of candidates that were low: 1, or it and its equals in other layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The result of `search`."""

    plan: Plan
    """Names of the candidates that run low."""
    errors: Mapping[str, float]
    """Largest measured error over all batches, by quantity."""
    held_out: Mapping[str, float]
    """Largest error on the batches that only check the plan; empty without such."""
    budget: Mapping[str, float]
    met: bool
    """Whether the errors on all batches are within the budget. Only a float32 program that is not reproducible, or
    that autocast cannot keep in float32, makes it False."""
    alone: Mapping[str, Alone]
    """Candidate -> what it contributes; empty if everything low is within the budget."""


def search(program: SearchProgram, *, budget: Mapping[str, float], held_out: int | None = None) -> Found:
    """The plan with the fewest candidates in float32, those that contribute most, whose errors are within `budget`.

    Quantities that the budget does not name must be finite.  The last `held_out` batches only check the result; None is
    a quarter, at least one.

    Raises:
        SearchError: the budget is not positive, names a quantity that is not measured, or there are too few batches.
    """
    for name, value in budget.items():
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise SearchError(f"budget {name} = {value!r}: expected a positive relative error, e.g. 1e-3")
    if not budget:
        raise SearchError('the budget names no quantity; expected e.g. {"loss": 1e-3}')
    kept = max(1, program.batches // 4) if held_out is None else held_out
    if not 0 <= kept < program.batches:
        raise SearchError(
            f"{program.batches} batches, {kept} of them held out: a search needs one or more to measure on, and as a "
            "rule one or more to check the plan on; give two or more different batches"
        )
    return _Search(program, budget, kept).run()


class _Search:
    def __init__(self, program: SearchProgram, budget: Mapping[str, float], held_out: int) -> None:
        self.candidates = {each.name: each for each in program.candidates}
        self.program = program
        self.budget = budget
        self.used = range(program.batches - held_out)
        self.kept = range(program.batches - held_out, program.batches)
        self.measured: dict[tuple[Plan, int], Mapping[str, float]] = {}
        self.alone: dict[str, Alone] = {}

    def run(self) -> Found:
        known = self._errors(Plan(), 0)
        if missing := [name for name in self.budget if name not in known]:
            raise SearchError(
                f"the budget names {', '.join(missing)}; this program has {', '.join(known) or 'nothing'}"
            )
        plan, every = self._within_budget(), range(self.program.batches)
        return Found(
            plan=plan,
            errors=self._largest(plan, every),
            held_out=self._largest(plan, self.kept),
            budget=dict(self.budget),
            met=self._fits(plan, every),
            alone=self.alone,
        )

    def _within_budget(self) -> Plan:
        everything = Plan(self.candidates)
        if self._fits(everything, self.used) and self._fits(everything, self.kept):
            return everything
        units = sorted(self._units(), key=lambda unit: -self._load(unit, self.used))  # stable: upstream first

        def after(count: int) -> Plan:
            return everything.difference(*units[:count])

        fails, fits = -1, len(units)
        while fits - fails > 1:
            middle = (fails + fits) // 2
            fails, fits = (fails, middle) if self._fits(after(middle), self.used) else (middle, fits)
        while fits < len(units) and not self._fits(after(fits), self.kept):
            fits += 1
        return after(fits)

    def _units(self) -> list[Plan]:
        """Candidates that get float32 back together, each measured alone, in the order of the program."""
        kinds: dict[tuple[str, str], list[str]] = {}
        for name, each in self.candidates.items():
            kinds.setdefault((paths.pattern(each.scope), each.operation), []).append(name)
        units: list[Plan] = []
        for names in kinds.values():
            together = self._note_alone(Plan(names))
            splits = len(names) > 1 and self._load(together, self.used) > SMALL
            units += [self._note_alone(Plan({name})) for name in names] if splits else [together]
        return units

    def _note_alone(self, unit: Plan) -> Plan:
        errors, load = self._largest(unit, self.used), self._load(unit, self.used)
        self.alone.update(dict.fromkeys(unit, Alone(errors=errors, load=load, together=len(unit))))
        return unit

    def _fits(self, plan: Plan, batches: Iterable[int]) -> bool:
        return self._load(plan, batches) <= 1

    def _load(self, plan: Plan, batches: Iterable[int]) -> float:
        """Largest share of the budget that an error takes; infinite if a quantity is not finite."""
        errors = self._largest(plan, batches)
        if not all(map(math.isfinite, errors.values())):
            return math.inf
        return max((errors[name] / limit for name, limit in self.budget.items() if name in errors), default=0.0)

    def _largest(self, plan: Plan, batches: Iterable[int]) -> dict[str, float]:
        measured = [self._errors(plan, batch) for batch in batches]
        return {name: max(each[name] for each in measured) for name in (measured[0] if measured else ())}

    def _errors(self, plan: Plan, batch: int) -> Mapping[str, float]:
        if (plan, batch) not in self.measured:
            tried = f"{len(plan)} of {len(self.candidates)} low, batch {batch}"
            progress.tell(f"{len(self.measured)} measured, now {tried}")
            found = self.program.evaluate(plan, batch)
            self.measured[plan, batch] = {k: math.inf if math.isnan(v) else abs(float(v)) for k, v in found.items()}
        return self.measured[plan, batch]
