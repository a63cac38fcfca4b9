"""A policy file that a search wrote on one front gives the same casts on the others, where scopes are the same."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest
import torch

import xla_amp
import xla_amp.jax
from xla_amp.errors import RuleWarning
from xla_amp.tools import search as plan_search
from xla_amp.tools.search import Plan

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
        policy = plan_search.policy(chosen, candidates, "bfloat16")
        (folder / f"{name}.toml").write_text(plan_search.to_toml(policy, "only b in float32"))
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
