"""`xla_amp.search` on torch programs, on the CPU and on the lazy device."""

from __future__ import annotations

import pytest
import torch

import xla_amp
from xla_amp.errors import SearchError
from xla_amp.tools.search import SearchResult

BUDGET = {"loss": 1e-2, "gradients": 2e-2}


class NearlyEqual(torch.nn.Module):
    """The difference of two products that are nearly equal."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(32, 32, bias=False) for _ in range(3))
        with torch.no_grad():
            for part in (self.a, self.c):
                part.weight.copy_(torch.randn(32, 32, generator=generator) / 6)
            self.b.weight.copy_(self.a.weight * 1.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x) - self.b(x)).square().mean()


def batches(seed: int, number: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 32, generator=generator) for _ in range(number)]


@pytest.fixture(scope="module", params=["xla", pytest.param("cpu", marks=pytest.mark.full)])
def found(request) -> tuple[NearlyEqual, SearchResult]:
    device = xla_amp.xla_device() if request.param == "xla" else torch.device("cpu")
    model = NearlyEqual().to(device)
    return model, xla_amp.search(model, batches(0), budget=BUDGET)


def gradients(model: torch.nn.Module, x: torch.Tensor, **region: object) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    device = next(model.parameters()).device
    with xla_amp.autocast(device, **region):
        loss = model(x.to(device))
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.cpu().flatten() for p in model.parameters()])


def test_both_nearly_equal_products_stay_in_float32(found):
    _, result = found
    assert result.met
    assert {name: result.policy.decide("linear", name).cast for name in "abc"} == {"a": "fp32", "b": "fp32", "c": "low"}


def test_the_error_on_new_batches_is_within_the_budget(found):
    model, result = found
    for x in batches(1, 3):
        wide, right = gradients(model, x, enabled=False)
        low, given = gradients(model, x, policy=result.policy)
        assert 0 < abs(low - wide) / wide <= BUDGET["loss"]
        assert 0 < (given - right).norm() / right.norm() <= BUDGET["gradients"]
        _, worst = gradients(model, x, policy="lean")
        assert (worst - right).norm() / right.norm() > BUDGET["gradients"]


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


@pytest.mark.full
def test_a_model_without_a_loss_is_compared_by_its_result():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    result = xla_amp.search(model, [(torch.randn(4, 8),) for _ in range(3)], budget=0.1)
    assert list(result.errors) == ["output"]
    assert 0 < result.errors["output"] <= 0.1 or not result.found.plan


def _autocast_inside(x):
    with xla_amp.autocast("cpu"):
        return (x @ x).sum()


def _torchs_inside(x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x).sum()


def test_tokens_are_batches_too():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    tokens = [torch.randint(11, (4, 6)) for _ in range(4)]
    result = xla_amp.search(step, tokens, budget=BUDGET)
    assert (result.met, result.policy.decide("linear", "1").cast) == (True, "low")


@pytest.mark.parametrize(
    ("step", "data", "arguments", "words"),
    [
        (lambda x: x.sum(), [], {}, "no batches"),
        (lambda x: x.sum(), [torch.ones(2)], {}, "give two or more different batches"),
        (lambda x: x.sum(), [torch.ones(2)] * 3, {"low": "float8"}, "expected one of bfloat16, float16"),
        (lambda x: None, [torch.ones(2)] * 3, {}, "returns NoneType without a floating tensor"),
        (lambda x: (x / 0).sum(), [torch.ones(2)] * 3, {}, "batch 0: the loss is not finite in float32"),
        (_autocast_inside, [torch.ones(2, 2)] * 3, {}, r"opens an autocast region \(policy cpu\)"),
        (_torchs_inside, [torch.ones(2, 2)] * 3, {}, "opens an autocast region"),
    ],
)
def test_steps_that_cannot_be_searched(step, data, arguments, words):
    with pytest.raises(SearchError, match=words):
        xla_amp.search(step, data, **{"budget": 0.1, **arguments})


def test_a_step_that_calls_backward_is_refused():
    model = torch.nn.Linear(2, 1)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    with pytest.raises(SearchError, match=r"calls backward\(\): return the loss"):
        xla_amp.search(step, [torch.ones(1, 2)] * 3, budget=0.1)
