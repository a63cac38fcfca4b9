"""`search` on both fronts: one promise, a program of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import xla_amp
import xla_amp.jax
from xla_amp.errors import SearchError
from xla_amp.tools.search.fronts import SearchResult

BUDGET = {"loss": 1e-2, "gradients": 2e-2}
random = np.random.default_rng(0)
A, C = (random.standard_normal((32, 32)).astype(np.float32) / 6 for _ in "ac")


def batches(seed: int, number: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.standard_normal((8, 32)).astype(np.float32) for _ in range(number)]


class NearlyEqual(torch.nn.Module):
    """The difference of two products that are nearly equal, and a harmless one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(32, 32, bias=False) for _ in range(3))
        with torch.no_grad():
            for part, value in ((self.a, A), (self.b, A * np.float32(1.01)), (self.c, C)):
                part.weight.copy_(torch.from_numpy(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x) - self.b(x)).square().mean()


def loss(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The same in JAX, with named scopes."""
    with jax.named_scope("a"):
        a = x @ parameters["a"]
    with jax.named_scope("b"):
        b = x @ parameters["b"]
    with jax.named_scope("c"):
        return jnp.mean(((a - b) @ parameters["c"]) ** 2)


@dataclasses.dataclass
class Front:
    """A searched program."""

    result: SearchResult
    product: str
    run: Callable[..., tuple[float, np.ndarray]]
    """The loss and all gradients of one batch, under a policy or in float32."""


def torch_front(device: torch.device) -> Front:
    model = NearlyEqual().to(device)

    def run(x: np.ndarray, policy: Any = None) -> tuple[float, np.ndarray]:
        model.zero_grad()
        with xla_amp.autocast(device, enabled=policy is not None, policy=policy):
            value = model(torch.from_numpy(x).to(device))
        value.backward()
        return float(value.detach()), np.concatenate([p.grad.cpu().numpy().ravel() for p in model.parameters()])

    return Front(xla_amp.search(model, list(map(torch.from_numpy, batches(0, 5))), budget=BUDGET), "linear", run)


PARAMETERS = {name: jnp.asarray(value.T) for name, value in (("a", A), ("b", A * np.float32(1.01)), ("c", C))}


def jax_front() -> Front:
    def run(x: np.ndarray, policy: Any = None) -> tuple[float, np.ndarray]:
        function = loss if policy is None else xla_amp.jax.autocast(loss, policy=policy)
        value, gradients = jax.jit(jax.value_and_grad(function))(PARAMETERS, x)
        return float(value), np.concatenate([np.ravel(leaf) for leaf in gradients.values()])

    return Front(xla_amp.jax.search(loss, [(PARAMETERS, x) for x in batches(0, 5)], budget=BUDGET), "matmul", run)


@pytest.fixture(scope="module", params=["xla", "jax", pytest.param("cpu", marks=pytest.mark.full)])
def front(request) -> Front:
    if request.param == "jax":
        return jax_front()
    return torch_front(xla_amp.xla_device() if request.param == "xla" else torch.device("cpu"))


def test_both_nearly_equal_products_stay_in_float32(front):
    assert front.result.met
    casts = {name: front.result.policy.decide(front.product, name).cast for name in "abc"}
    assert casts == {"a": "fp32", "b": "fp32", "c": "low"}


def test_the_error_on_new_batches_is_within_the_budget_and_the_file_gives_the_same_results(front, tmp_path):
    front.result.save(tmp_path / "plan.toml")
    for x in batches(1, 3):
        (wide, right), (low, given) = front.run(x), front.run(x, front.result.policy)
        assert 0 < abs(low - wide) / wide <= BUDGET["loss"]
        assert 0 < np.linalg.norm(given - right) / np.linalg.norm(right) <= BUDGET["gradients"]
        loss, same = front.run(x, tmp_path / "plan.toml")
        assert (loss, same.tolist()) == (low, given.tolist())
        _, worst = front.run(x, "lean")
        assert np.linalg.norm(worst - right) / np.linalg.norm(right) > BUDGET["gradients"]


def test_what_overflows_in_float16_stays_in_float32():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    with torch.no_grad():
        model[1].weight.mul_(3e5)
        model[2].weight.mul_(1e-5)
    data = [torch.randn(8, 16) for _ in range(4)]
    result = xla_amp.search(lambda x: model(x).square().mean(), data, budget=2e-2, low="float16")
    assert result.met
    casts = [result.policy.decide("linear", name).cast for name in "012"]
    assert casts == ["low", "fp32", "fp32"]  # its result, and who reads it


class Step(torch.nn.Module):
    """Changes buffers, draws random numbers, and returns what transformers' models return."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.drop(self.norm(self.layer(x))), y), "count": torch.tensor(8)}


def test_nothing_that_the_step_changes_is_left_changed():
    torch.manual_seed(0)
    model = Step()
    gradient = model.layer.weight.grad = torch.ones(8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    data = [{"x": torch.randn(4, 8), "y": torch.randn(4, 8)} for _ in range(4)]
    drawn = torch.get_rng_state()
    result = xla_amp.search(model, data, budget=0.1)
    assert result.met
    assert list(result.errors) == ["loss", "gradients"]
    assert not torch.equal(state, drawn)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.layer.weight.grad is gradient
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "searched",
    [
        lambda: xla_amp.search(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), [torch.randn(4, 8)] * 3, budget=0.1
        ),
        lambda: xla_amp.jax.search(
            lambda x, n: {"y": x @ x / n, "n": n}, [(jnp.full((8, 8), 1.01), 3)] * 3, budget=0.1
        ),
    ],
    ids=["torch", "jax"],
)
def test_what_is_no_loss_is_compared_by_its_results(searched):
    result = searched()
    assert list(result.errors) == ["output"]
    assert 0 < result.errors["output"] <= 0.1


def test_a_step_that_calls_backward_is_refused():
    model = torch.nn.Linear(2, 1)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    with pytest.raises(SearchError, match=r"calls backward\(\): return the loss"):
        xla_amp.search(step, [torch.ones(1, 2)] * 3, budget=0.1)


def test_a_budget_that_no_low_product_meets_is_float32():
    result = xla_amp.jax.search(loss, [(PARAMETERS, x) for x in batches(1, 2)], budget={"gradients": 1e-9})
    assert result.errors["gradients"] == 0
    assert result.met


def test_a_number_is_a_budget_for_the_loss():
    result = xla_amp.jax.search(loss, [(PARAMETERS, x) for x in batches(1, 2)], budget=0.9)
    assert result.found.budget == {"loss": 0.9}
    assert list(result.errors) == ["loss", "gradients"]
    assert len(result.found.plan) == len(result.candidates)


def test_what_computes_in_float32_inside_is_no_candidate():
    def function(x):
        return jax.nn.softmax(x @ x) @ x

    rows = [jax.random.normal(jax.random.key(i), (8, 8)) for i in range(3)]
    result = xla_amp.jax.search(function, rows, budget=1e-7)
    assert [each.operation for each in result.candidates] == ["dot_general"]
    assert result.found.plan == frozenset()
    assert {row[0] for row in result.page().sections[-1].table.rows} == {"float32"}
    assert "0 of 1 candidates in bfloat16" in str(result)
    assert repr(result).startswith("SearchResult(met=True, 0 of 1 candidates low, errors={'output': ")


def _autocast_inside(x):
    with xla_amp.autocast("cpu"):
        return (x @ x).sum()


def _torchs_inside(x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x).sum()


def _jax_inside(x):
    return xla_amp.jax.autocast(lambda x: jnp.sum(x @ x), policy="tpu")(x)


TORCH, JAX, ONES = xla_amp.search, xla_amp.jax.search, np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("search", "step", "batches", "arguments", "words"),
    [
        (TORCH, torch.sum, 0, {}, "no batches"),
        (JAX, jnp.sum, 0, {}, "no arguments"),
        (TORCH, torch.sum, 1, {}, "give two or more different batches"),
        (TORCH, torch.sum, 3, {"low": "float8"}, "expected one of bfloat16, float16"),
        (JAX, jnp.sum, 3, {"low": "float8"}, "expected one of bfloat16, float16"),
        (TORCH, lambda x: None, 3, {}, "returns NoneType without a floating tensor"),
        (JAX, lambda x: x > 0, 3, {}, "returns no floating array"),
        (TORCH, lambda x: (x / 0).sum(), 3, {}, "batch 0: the loss is not finite in float32"),
        (JAX, lambda x: jnp.sum(x / 0), 3, {}, "batch 0: the loss is not finite in float32"),
        (TORCH, _autocast_inside, 3, {}, r"opens an autocast region \(policy cpu\)"),
        (TORCH, _torchs_inside, 3, {}, "opens an autocast region"),
        (JAX, _jax_inside, 3, {}, r"opens an autocast region \(policy tpu\)"),
    ],
)
def test_what_cannot_be_searched(search, step, batches, arguments, words):
    one = torch.from_numpy(ONES) if search is TORCH else jnp.asarray(ONES)
    with pytest.raises(SearchError, match=words):
        search(step, [one] * batches, **{"budget": 0.1, **arguments})
