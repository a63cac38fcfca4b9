"""Random operations: distributions, ranges, and that results depend only on the key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import check, lowering_of, run, sample

COUNT = 20_000
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NORMAL = torch.distributions.Normal


def draw(name: str, dtype: torch.dtype, *args: Any, seed: int = 0, count: int = COUNT, **kwargs: Any) -> torch.Tensor:
    """The values that the lowering writes into a tensor of `count` elements."""
    x = torch.zeros(count, dtype=dtype)
    return run(name, x, *args, seed=seed, **kwargs)[0]


def distance(values: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Kolmogorov's distance of a sample from a distribution, in units of 1 / sqrt(count).

    For a correct sample it is above 1.63 once in a hundred; for a wrong one it grows with the square root of the count.
    """
    x = values.double().sort().values
    expected, count = cdf(x), x.numel()
    above = torch.searchsorted(x, x, side="right") / count - expected
    below = expected - torch.searchsorted(x, x) / count
    return math.sqrt(count) * float(torch.maximum(above, below).max())


CONTINUOUS: dict[str, tuple[tuple[float, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "cauchy_": ((1.0, 2.0), torch.distributions.Cauchy(1.0, 2.0).cdf),
    "exponential_": ((2.0,), torch.distributions.Exponential(2.0).cdf),
    "log_normal_": ((0.5, 0.7), torch.distributions.LogNormal(0.5, 0.7).cdf),
    "normal_": ((2.0, 0.5), NORMAL(2.0, 0.5).cdf),
    "uniform_": ((-1.0, 3.0), lambda x: ((x + 1) / 4).clamp(0, 1)),
}


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_distribution(name, dtype):
    args, cdf = CONTINUOUS[name]
    values = draw(name, dtype, *args)
    wide = dtype in (torch.float32, torch.float64)
    assert distance(values, cdf) < (1.63 if wide else 3)  # rounding moves a number by up to half a unit
    assert (values >= -1).all() if name == "uniform_" else True
    assert (values < 3).all() if name == "uniform_" else True
    assert (values > 0).all() if name == "exponential_" else True


def test_a_wrong_distribution_is_noticed():
    assert distance(draw("normal_", torch.float32, 2.0, 0.5), NORMAL(2.0, 0.53).cdf) > 1.63


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_never_reaches_its_end(dtype):
    values = draw("uniform_", dtype, 0.0, 1.0, count=200_000)
    assert values.min() >= 0
    assert values.max() < 1
    assert draw("uniform_", dtype, 1.0, 1.0 + 2.0**-6, count=5000).max() < 1.0 + 2.0**-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(
    ("name", "args"),
    [("bernoulli_.float", (0.3,)), ("bernoulli_.Tensor", (torch.tensor(0.3),)), ("bernoulli.p", (0.3,))],
)
def test_bernoulli(name, args, dtype):
    values = draw(name, dtype, *args).double()
    assert set(values.tolist()) == {0.0, 1.0}
    assert values.mean().item() == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / COUNT))


def test_bernoulli_takes_a_probability_for_each_element():
    p = torch.tensor([0.0, 1.0, 0.5]).repeat_interleave(4000)
    for values in (
        run("bernoulli", p)[0],
        run("bernoulli.Tensor", torch.zeros_like(p), p)[0],
        run("bernoulli_.Tensor", torch.zeros_like(p), p.double())[0],
    ):
        never, always, half = values.view(3, 4000)
        assert never.sum() == 0
        assert always.sum() == 4000
        assert half.mean().item() == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(
    ("dtype", "args", "low", "high"),
    [
        (torch.int64, (10,), 0, 10),
        (torch.float32, (10,), 0, 10),
        (torch.uint8, (256,), 0, 256),
        (torch.int32, (-5, 6), -5, 6),
        (torch.bfloat16, (-5, 6), -5, 6),
    ],
)
def test_integers_take_each_value_of_a_small_range(dtype, args, low, high):
    values = draw("random_.to" if len(args) == 1 else "random_.from", dtype, *args).to(torch.int64)
    counts = torch.bincount(values - low, minlength=high - low)
    assert counts.numel() == high - low
    expected = COUNT / (high - low)
    assert (counts - expected).abs().max() < 5 * math.sqrt(expected)


@pytest.mark.parametrize(
    ("name", "dtype", "args", "low", "high"),
    [
        ("random_", torch.int64, (), 0, 2.0**63),
        ("random_", torch.int32, (), 0, 2.0**31),
        ("random_", torch.uint8, (), 0, 256),
        ("random_", torch.bool, (), 0, 2),
        ("random_", torch.float32, (), 0, 2.0**24),
        ("random_", torch.bfloat16, (), 0, 2.0**8),
        ("random_.from", torch.int64, (5, None), 5, 2.0**63),
        ("random_.from", torch.int64, (-(2**63), None), -(2.0**63), 2.0**63),
        ("random_.from", torch.int64, (2**40, 2**50), 2.0**40, 2.0**50),
        ("random_.from", torch.float32, (3, None), 3, 2.0**24),
    ],
)
def test_integers_fill_a_wide_range(name, dtype, args, low, high):
    values = draw(name, dtype, *args).double()
    span = high - low
    assert low <= values.min() <= low + 0.01 * span
    assert high - 0.01 * span - 1 <= values.max() <= high
    if span > COUNT:
        assert distance(values, lambda x: (x - low) / span) < 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_geometric_counts_trials(dtype):
    values = draw("geometric_", dtype, 0.3).double()
    assert values.min() == 1
    for trials in (1, 2, 5):
        share = (values == trials).double().mean().item()
        assert share == pytest.approx(0.3 * 0.7 ** (trials - 1), abs=0.013)


def test_normal_of_given_means_and_deviations():
    mean, std = torch.full((COUNT,), 3.0), torch.full((COUNT,), 2.0)
    for values in (
        run("normal.Tensor_float", mean, 2.0)[0],
        run("normal.float_Tensor", 3.0, std)[0],
        run("normal.Tensor_Tensor", torch.tensor([3.0]), std)[0],
        run("normal.float_float", 3.0, 2.0, [COUNT])[0],
    ):
        assert distance(values, NORMAL(3.0, 2.0).cdf) < 1.63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(dtype):
    x = sample(COUNT, dtype=dtype, low=1.0, high=3.0)
    kept, mask = run("native_dropout", x, 0.3, True)
    assert mask.double().mean().item() == pytest.approx(0.7, abs=0.013)
    assert torch.equal(kept != 0, mask)
    torch.testing.assert_close(kept, torch.where(mask, x.float() / 0.7, 0.0).to(dtype))
    check("native_dropout_backward", sample(COUNT, dtype=dtype, seed=1), mask, 1 / 0.7)


def test_dropout_at_its_ends():
    x = sample(1000, low=1.0, high=3.0)
    kept, mask = run("native_dropout", x, 1.0, True)
    assert not mask.any()
    assert torch.equal(kept, torch.zeros_like(x))
    kept, mask = run("native_dropout", x, 0.0, True)
    assert mask.all()
    assert torch.equal(kept, x)
    check("native_dropout", x, 0.3, False)


def test_randperm_is_an_order():
    for name in ("randperm", "randperm.generator"):
        order = run(name, 1000, **({"generator": None} if "." in name else {}))[0]
        assert torch.equal(order.sort().values, torch.arange(1000))
        assert not torch.equal(order, torch.arange(1000))


WEIGHTS = torch.tensor([[1.0, 0.0, 2.0, 1.0], [0.0, 0.0, 0.0, 3.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_multinomial_with_replacement(dtype):
    taken = run("multinomial", WEIGHTS.to(dtype), 5000, True)[0]
    shares = torch.stack([torch.bincount(drawn, minlength=4) / 5000 for drawn in taken])
    torch.testing.assert_close(shares, WEIGHTS / WEIGHTS.sum(-1, keepdim=True), atol=0.03, rtol=0)
    assert shares[0, 1] == 0
    assert shares[1, 3] == 1


def test_multinomial_without_replacement():
    many = WEIGHTS[0].expand(6000, 4).contiguous()
    first, second = run("multinomial", many, 2)[0].unbind(1)
    assert (first != second).all()
    assert not (first == 1).any()
    assert (first == 2).double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert (second[first == 2] == 0).double().mean().item() == pytest.approx(0.5, abs=0.04)
    one = run("multinomial", WEIGHTS[0], 3)[0]
    assert sorted(one.tolist()) == [0, 2, 3]


def test_counts_and_shares():
    poisson = run("poisson", torch.full((COUNT,), 3.5))[0]
    assert poisson.mean().item() == pytest.approx(3.5, abs=0.06)
    assert poisson.var().item() == pytest.approx(3.5, abs=0.2)
    binomial = run("binomial", torch.full((COUNT,), 10.0), torch.full((COUNT,), 0.3))[0]
    assert binomial.mean().item() == pytest.approx(3.0, abs=0.06)
    assert binomial.max() <= 10
    gamma = run("_standard_gamma", torch.full((COUNT,), 2.5))[0]
    assert gamma.mean().item() == pytest.approx(2.5, abs=0.06)
    assert gamma.var().item() == pytest.approx(2.5, abs=0.2)
    shares = run("_sample_dirichlet", torch.tensor([1.0, 2.0, 5.0]).expand(4000, 3))[0]
    torch.testing.assert_close(shares.sum(-1), torch.ones(4000))
    torch.testing.assert_close(shares.mean(0), torch.tensor([1.0, 2.0, 5.0]) / 8, atol=0.02, rtol=0)


def test_gamma_gradient():
    # torch and XLA expand the derivative differently; both are good to three digits.
    check("_standard_gamma_grad", sample(50, low=0.3, high=4.0), sample(50, low=0.1, high=5.0), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "args"),
    [("normal_", ()), ("uniform_", ()), ("random_", ()), ("exponential_", ()), ("bernoulli_.float", (0.5,))],
)
def test_a_key_decides_everything(name, args):
    first, again, other = (draw(name, torch.float32, *args, seed=seed, count=100) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", [*CONTINUOUS, "geometric_", "bernoulli_.float"])
def test_parameters_of_fills_are_data(name):
    schema = getattr(torch.ops.aten, name.partition(".")[0])
    arguments = getattr(schema, name.partition(".")[2] or "default")._schema.arguments
    floats = {argument.name for argument in arguments if str(argument.type) == "float"}
    assert lowering_of(name).lifted == floats
