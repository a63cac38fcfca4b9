"""The search on programs whose errors are known, compared with every plan there is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import pytest

from xla_amp.errors import DeviceError, SearchError
from xla_amp.policy import load
from xla_amp.tools import search as plan_search
from xla_amp.tools.search import Candidate, Plan, measurements


@dataclasses.dataclass
class Synthetic(plan_search.SearchProgram):
    """Independent errors that add up, and pairs whose errors come only together."""

    sizes: dict[str, float]
    savings: dict[str, float]
    pairs: dict[frozenset[str], float] = dataclasses.field(default_factory=dict)
    spread: float = 0.1
    batches: int = 6
    fingerprint: str = "synthetic"
    calls: int = 0
    bad: dict[int, float] = dataclasses.field(default_factory=dict)
    """Batch -> factor of its errors."""

    @property
    def candidates(self) -> list[Candidate]:
        return [
            Candidate(name=f"module:{name}.linear", scope=name, operation="linear", seconds=self.savings[name])
            for name in self.sizes
        ]

    def exact(self, plan: Plan) -> float:
        scopes = {name.split(":")[1].removesuffix(".linear") for name in plan}
        together = sum(value for pair, value in self.pairs.items() if pair <= scopes)
        return math.sqrt(sum(self.sizes[name] ** 2 for name in scopes)) + together

    def evaluate(self, plan: Plan, batch: int) -> dict[str, float]:
        self.calls += 1
        factor = 1 + self.spread * random.Random(f"{sorted(plan)} {batch}").uniform(-1, 1)
        return {"loss": self.exact(plan) * factor * self.bad.get(batch, 1.0)}

    def noise(self) -> dict[str, float]:
        return {"loss": 1e-7}


def small(seed: int, number: int = 7) -> Synthetic:
    draw = random.Random(seed)
    names = [f"h.{index}" for index in range(number)]
    sizes = {name: 10 ** draw.uniform(-5, -2) for name in names}
    pairs = {frozenset(draw.sample(names, 2)): 2e-3} if seed % 2 else {}
    return Synthetic(sizes, {name: draw.uniform(0.2, 2) for name in names}, pairs)


def cheapest(program: Synthetic, budget: float, used: int, least: float) -> float:
    """Saving of the best of all plans, by the same bound."""
    best = 0.0
    names = [each.name for each in program.candidates]
    for chosen in itertools.product((False, True), repeat=len(names)):
        plan = frozenset(name for name, low in zip(names, chosen, strict=True) if low)
        errors = [program.evaluate(plan, batch)["loss"] for batch in range(used)]
        if measurements.bound(errors, 0.99, least) <= budget:
            best = max(best, sum(each.seconds for each in program.candidates if each.name in plan))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_as_good_as_the_best_of_all_plans(seed: int):
    program = small(seed)
    found = plan_search.search(program, budget={"loss": 3e-3})
    best = cheapest(program, 3e-3, 5, found.spread["loss"])
    total = sum(each.seconds for each in program.candidates)
    assert found.met
    assert found.complete
    assert max(found.errors["loss"], found.held_out["loss"], found.bounds["loss"]) <= 3e-3
    assert 2 * total - found.seconds <= 1.05 * (2 * total - best)  # a low operation takes half of its time


def test_the_best_of_many_plans_keeps_to_the_budget_on_further_batches():
    over = 0
    for seed in range(20):
        draw = random.Random(seed)
        sizes = {f"h.{i}": draw.uniform(5e-4, 2e-3) for i in range(20)}
        program = Synthetic(sizes, {name: draw.uniform(0.5, 2) for name in sizes}, batches=8)
        found = plan_search.search(program, budget={"loss": 3e-3})
        assert found.plan
        over += sum(program.evaluate(found.plan, batch)["loss"] > 3e-3 for batch in range(100, 200))
    assert over / (20 * 100) <= 0.01  # where each plan has its own spread alone it is 0.04


def test_small_errors_that_are_the_same_on_every_batch_do_not_narrow_the_bound():
    class Steady(Synthetic):
        def evaluate(self, plan: Plan, batch: int) -> dict[str, float]:
            near = min(1.0, self.exact(plan) / 2e-3) ** 4
            return {"loss": self.exact(plan) * (1 + 0.06 * near * random.Random(f"{sorted(plan)} {batch}").gauss(0, 1))}

    over = 0
    for seed in range(20):
        draw = random.Random(seed)
        sizes = {f"h.{i}": draw.uniform(2e-4, 1.2e-3) for i in range(20)}
        program = Steady(sizes, {name: draw.uniform(0.5, 2) for name in sizes}, batches=8)
        found = plan_search.search(program, budget={"loss": 2.5e-3})
        assert found.plan
        over += sum(program.evaluate(found.plan, batch)["loss"] > 2.5e-3 for batch in range(100, 200))
    assert over / (20 * 100) <= 0.01  # where the spreads of small errors count, too, it is 0.035


def test_all_low_is_one_measurement_where_it_fits():
    program = small(0)
    found = plan_search.search(program, budget={"loss": 1.0})
    assert len(found.plan) == 7
    assert program.calls == 5 + 6  # float32, and low on the held-out batch, too


def test_what_loses_time_stays_in_float32():
    program = small(0)
    program.savings["h.3"] = -1.0
    found = plan_search.search(program, budget={"loss": 1.0})
    assert found.plan == {each.name for each in program.candidates} - {"module:h.3.linear"}


def test_kinds_of_layers_are_split_only_where_they_matter():
    names = [f"h.{i}.{part}" for i in range(20) for part in ("mlp", "attn")]
    sizes = {name: 1e-6 if name.endswith("mlp") else 2e-3 for name in names}
    program = Synthetic(sizes, dict.fromkeys(names, 1.0))
    found = plan_search.search(program, budget={"loss": 4e-3})
    assert {name for name in found.plan if "mlp" in name} == {f"module:h.{i}.mlp.linear" for i in range(20)}
    assert len(found.alone["module:h.0.mlp.linear"].plan) == 20
    assert len(found.alone["module:h.0.attn.linear"].plan) == 1
    assert len(found.plan) >= 20 + 2


def test_the_upstream_one_of_two_equal_candidates_leaves_first():
    program = Synthetic({"a": 1e-3, "b": 1e-3}, {"a": 1.0, "b": 1.0}, spread=0.0)
    assert plan_search.search(program, budget={"loss": 1.2e-3}).plan == {"module:b.linear"}


def test_a_plan_that_fails_on_held_out_batches_is_not_the_result():
    program = Synthetic({"a": 1e-3, "b": 1e-4, "c": 1e-5}, dict.fromkeys("abc", 1.0), bad={5: 30.0})
    found = plan_search.search(program, budget={"loss": 2e-3})
    assert found.plan == {"module:c.linear"}
    assert found.met
    assert found.held_out["loss"] <= 2e-3
    assert "held-out" in found.notes[0]


def test_a_program_that_float32_cannot_keep_is_not_met():
    program = small(0)
    program.exact = lambda plan: 0.5  # type: ignore[method-assign]
    found = plan_search.search(program, budget={"loss": 1e-3})
    assert not found.met
    assert found.plan == frozenset()
    assert found.errors["loss"] > 0.4


def test_a_value_that_is_not_finite_never_fits():
    program = small(0, 3)
    program.evaluate = lambda plan, batch: {"loss": 0.0, "gradients": math.nan if plan else 0.0}  # type: ignore[method-assign]
    found = plan_search.search(program, budget={"loss": 1.0})
    assert found.plan == frozenset()
    assert found.met


def test_time_ends_with_the_best_plan_so_far():
    found = plan_search.search(small(3), budget={"loss": 1e-3}, budget_seconds=0.0)
    assert not found.complete
    assert found.plan == frozenset()
    assert found.met
    assert "time ended" in found.notes[0]


def test_an_interrupted_search_continues(tmp_path):
    journal = tmp_path / "search.jsonl"
    whole = plan_search.search(small(5), budget={"loss": 1e-3})
    first = small(5)
    limit, evaluate = 20, first.evaluate

    def stop(plan: Plan, batch: int) -> dict[str, float]:
        if first.calls >= limit:
            raise KeyboardInterrupt
        return evaluate(plan, batch)

    first.evaluate = stop
    with pytest.raises(KeyboardInterrupt):
        plan_search.search(first, budget={"loss": 1e-3}, journal=str(journal))
    with journal.open("a") as file:
        file.write('{"program": "synthetic", "pl')  # killed while it wrote
    assert len(journal.read_text().splitlines()) == limit + 1
    second, plain = small(5), small(5)
    found = plan_search.search(second, budget={"loss": 1e-3}, journal=str(journal))
    plan_search.search(plain, budget={"loss": 1e-3})
    assert found.plan == whole.plan
    assert second.calls == plain.calls - limit
    other = small(5)
    other.fingerprint = "other weights"
    plan_search.search(other, budget={"loss": 1e-3}, journal=str(journal))
    assert other.calls == plain.calls


@pytest.mark.parametrize(
    ("budget", "arguments", "words"),
    [
        ({}, {}, "names no quantity"),
        ({"loss": 0.0}, {}, "budget loss = 0.0: expected a positive"),
        ({"accuracy": 0.1}, {}, "the budget names accuracy; this program has loss"),
        ({"loss": 0.1}, {"held_out": 5}, "6 batches, 5 of them held out"),
    ],
)
def test_mistakes_of_a_search(budget, arguments, words):
    with pytest.raises(SearchError, match=words):
        plan_search.search(small(0), budget=budget, **arguments)


def test_a_budget_below_float32_is_said():
    found = plan_search.search(small(0), budget={"loss": 1e-8})
    assert "below what one rounding" in found.notes[0]


@pytest.mark.parametrize(("freedom", "exact"), [(2, 6.965), (3, 4.541), (5, 3.365), (10, 2.764)])
def test_the_quantile_of_students_distribution(freedom: int, exact: float):
    assert measurements.student(0.99, freedom) == pytest.approx(exact, rel=0.1 if freedom < 5 else 0.01)


def test_a_result_as_policy_file_table_and_page(tmp_path):
    program = small(2)
    found = plan_search.search(program, budget={"loss": 3e-3})
    result = plan_search.SearchResult(
        found=found,
        candidates=program.candidates,
        low="bfloat16",
        in_effect=found.plan,
        target="TPU v6e",
        estimated={"float32": 20.0, "all low": 10.0, "plan": 20.0 - found.seconds},
        measured={},
    )
    path = tmp_path / "plan.toml"
    result.save(path)
    read = load(path)
    for each in program.candidates:
        asked = (each.operation, each.scope)
        assert (
            read.decide(*asked).cast
            == result.policy.decide(*asked).cast
            == ("low" if each.name in found.plan else "fp32")
        )
        assert read.decide(*asked).why.startswith("measured: linear alone in bfloat16: error of loss ")
    text = str(result)
    assert f"achieved error of loss {found.errors['loss']:.1e} of 3.0e-03" in " ".join(text.split())
    loads = [found.alone[each.name].load for each in program.candidates]
    first = next(row for row in result.document().tables[0].rows)
    assert first.cells[4] == found.alone[program.candidates[loads.index(max(loads))].name].errors["loss"]
    result.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert json.dumps("loss error") in page


def test_unknown_targets():
    with pytest.raises(DeviceError, match=r"target 'h800': expected one of .*h100.*or None"):
        plan_search.rates("h800")
