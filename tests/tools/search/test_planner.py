"""The search on programs whose errors are known: what contributes most gets float32 back, and nothing else."""

from __future__ import annotations

import dataclasses
import math
import random
import warnings

import jax
import jax.numpy as jnp
import pytest
import torch

import xla_amp
import xla_amp.jax
from xla_amp.errors import RuleWarning, SearchError
from xla_amp.policy import load
from xla_amp.tools import search as plan_search
from xla_amp.tools.search import Candidate, Plan


@dataclasses.dataclass
class Synthetic(plan_search.SearchProgram):
    """Independent errors that add up."""

    sizes: dict[str, float]
    batches: int = 6
    calls: int = 0
    bad: dict[int, float] = dataclasses.field(default_factory=dict)
    """Batch -> factor of its errors."""

    @property
    def candidates(self) -> list[Candidate]:
        return [Candidate(name=f"module:{name}.linear", scope=name, operation="linear") for name in self.sizes]

    def exact(self, plan: Plan) -> float:
        scopes = {name.split(":")[1].removesuffix(".linear") for name in plan}
        return math.sqrt(sum(self.sizes[name] ** 2 for name in scopes))

    def evaluate(self, plan: Plan, batch: int) -> dict[str, float]:
        self.calls += 1
        return {"loss": self.exact(plan) * self.bad.get(batch, 1.0)}


def back(program: Synthetic, found: plan_search.Found) -> set[str]:
    """Scopes in float32."""
    return {each.scope for each in program.candidates if each.name not in found.plan}


def small(seed: int, number: int = 7) -> Synthetic:
    draw = random.Random(seed)
    return Synthetic({f"h.{index}": 10 ** draw.uniform(-5, -2) for index in range(number)})


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_keeps_fewer_in_float32(seed: int):
    """Errors add as squares, so the largest ones have to go; one fewer of them is over the budget."""
    program = small(seed)
    found = plan_search.search(program, budget={"loss": 3e-3})
    assert found.met
    largest = sorted(program.sizes, key=lambda name: -program.sizes[name])
    kept = back(program, found)
    assert kept == set(largest[: len(kept)])
    rest = largest[len(kept) - 1 :] if kept else []
    assert not kept or math.sqrt(sum(program.sizes[name] ** 2 for name in rest)) > 3e-3
    assert max(found.errors.values()) <= 3e-3


def test_everything_low_that_fits_is_not_searched():
    program = Synthetic({"a": 1e-3, "b": 1e-3})
    found = plan_search.search(program, budget={"loss": 1e-2})
    assert (back(program, found), found.alone) == (set(), {})
    assert program.calls == 1 + 6  # float32 once, everything low on each batch


def test_layers_of_a_kind_that_matters_little_are_measured_together():
    sizes = {
        f"{part}.{index}": (1e-2 if (part, index) == ("bad", 3) else 1e-6)
        for part in ("bad", "good")
        for index in range(20)
    }
    program = Synthetic(sizes, batches=4)
    found = plan_search.search(program, budget={"loss": 3e-3})
    assert back(program, found) == {"bad.3"}
    assert program.calls < 4 * (3 + 2 + 20 + math.log2(22) + 1)


def test_batches_that_were_held_out_decide_too():
    program = Synthetic({"a": 5e-3, "b": 1e-3}, bad={5: 3.0})
    found = plan_search.search(program, budget={"loss": 6e-3})
    assert found.met
    assert back(program, found) == {"a"}
    assert found.held_out["loss"] == found.errors["loss"] == pytest.approx(3e-3)


def test_a_float32_program_that_is_not_reproducible_is_not_met():
    class Random(Synthetic):
        def exact(self, plan: Plan) -> float:
            return 1.0

    found = plan_search.search(Random({"a": 1.0}), budget={"loss": 1e-2})
    assert (found.met, found.plan) == (False, Plan())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": {"loss": 0}}, "expected a positive relative error"),
        ({"budget": {}}, "names no quantity"),
        ({"budget": {"accuracy": 1.0}}, "names accuracy; this program has loss"),
        ({"budget": {"loss": 1.0}, "held_out": 6}, "give two or more different batches"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(SearchError, match=words):
        plan_search.search(Synthetic({"a": 1.0}), **arguments)


def test_a_plan_as_a_file_is_the_same_policy(tmp_path):
    program = small(0)
    chosen = frozenset(each.name for each in program.candidates[::2])
    made = plan_search.policy(chosen, program.candidates, "bfloat16")
    text = plan_search.to_toml(chosen, program.candidates, "bfloat16", lambda _: 'a "quoted" reason', "", ["a comment"])
    (tmp_path / "plan.toml").write_text(text, encoding="utf-8")
    read = load(tmp_path / "plan.toml")
    for each in program.candidates:
        expected = "low" if each.name in chosen else "fp32"
        assert made.decide("linear", each.scope).cast == read.decide("linear", each.scope).cast == expected


# A policy file that a search wrote on one front gives the same casts on the others, where scopes are the same.

NAMES = ("first", "a", "b", "last")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = (torch.nn.Linear(16, 16) for _ in NAMES)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x):
        x = self.norm(torch.tanh(self.first(x)))
        return self.last(self.a(x) - self.b(x)).square().mean()


def loss(weights, x):
    def product(name, x):
        with jax.named_scope(name):
            return jnp.einsum("bi,ij->bj", x, weights[name])  # einsum adds a name scope, which is no module

    x = jnp.tanh(product("first", x))
    with jax.named_scope("norm"):
        x = x * jax.lax.rsqrt(jnp.mean(x * x))
    return jnp.mean(product("last", product("a", x) - product("b", x)) ** 2)


WEIGHTS = {name: jnp.full((16, 16), 0.1) for name in NAMES}
X = jnp.ones((4, 16))


def in_torch(policy):
    torch.manual_seed(0)
    with xla_amp.explain() as report, xla_amp.autocast("cpu", policy=policy):
        Model()(torch.randn(4, 16))
    return report


def in_jax(policy):
    with xla_amp.explain() as report:
        jax.eval_shape(xla_amp.jax.autocast(loss, policy=policy), WEIGHTS, X)
    return report


def in_stablehlo(policy):
    return xla_amp.stablehlo.autocast(jax.jit(loss).lower(WEIGHTS, X), policy=policy).report


FRONTS = {"torch": (in_torch, "linear"), "jax": (in_jax, "matmul"), "stablehlo": (in_stablehlo, "dot_general")}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Policy files in which only the product of `b` is in float32."""
    folder = tmp_path_factory.mktemp("plans")
    for name in ("torch", "jax"):
        run, _ = FRONTS[name]
        candidates = plan_search.from_records(run(plan_search.policy(Plan(), (), "bfloat16")).records)
        chosen = Plan(each.name for each in candidates if each.scope != "b")
        assert len(chosen) == len(candidates) - 1
        (folder / f"{name}.toml").write_text(plan_search.to_toml(chosen, candidates, "bfloat16"))
    return folder


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("found", ["torch", "jax"])
def test_a_plan_has_the_same_products_on_every_front(files, found, front):
    run, product = FRONTS[front]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuleWarning)
        rows = run(files / f"{found}.toml").rows()
    casts = {row["module"]: row["cast"] for row in rows if row["operation"] == product}
    assert casts == {"first": "low", "a": "low", "b": "fp32", "last": "low"}
    told = "".join(str(each.message) for each in caught if issubclass(each.category, RuleWarning))
    assert not told
