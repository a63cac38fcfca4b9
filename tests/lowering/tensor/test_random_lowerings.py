"""Random operations: distributions, ranges and ends.

Means and deviations of all distributions, and what a seed decides, are in
tests/lazy/torch_integration/test_generator.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import called, check, run, sample

from xla_amp import lazy as engine

COUNT = 20_000
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NORMAL = torch.distributions.Normal


def draw(calls: list[tuple[Any, ...]], count: int = COUNT) -> list[torch.Tensor]:
    """The values that each call, ``(name, dtype, *args)``, writes into a tensor of `count` elements; one program."""
    engine.manual_seed(0)
    device = engine.device()
    drawn = [called(name, (torch.zeros(count, dtype=dtype), *args), {}, device)[0] for name, dtype, *args in calls]
    engine.sync()
    return [values.cpu() for values in drawn]


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


@pytest.mark.parametrize("dtype", FLOATS)
def test_distribution(dtype):
    wide = dtype in (torch.float32, torch.float64)
    drawn = draw([(name, dtype, *args) for name, (args, _) in CONTINUOUS.items()])
    for (name, (_, cdf)), values in zip(CONTINUOUS.items(), drawn, strict=True):
        assert distance(values, cdf) < (1.63 if wide else 3), name  # rounding moves a number by up to half a unit
        assert (values > 0).all() or name != "exponential_"
        assert (values.min() >= -1 and values.max() < 3) or name != "uniform_"


def test_uniform_never_reaches_its_end():
    for values in draw([("uniform_", dtype, 0.0, 1.0) for dtype in FLOATS], count=200_000):
        assert values.min() >= 0
        assert values.max() < 1
    for values in draw([("uniform_", dtype, 1.0, 1.0 + 2.0**-6) for dtype in FLOATS], count=5000):
        assert values.max() < 1.0 + 2.0**-6


def test_halves_are_never_0_where_torch_excludes_it_nor_1():
    """Exponential numbers, also of a high rate, gamma numbers of a small shape, and the noise of gumbel_softmax."""
    engine.manual_seed(0)
    device, count = engine.device(), 2_000_000
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        empty = torch.empty(count, dtype=dtype, device=device)
        least = [empty.clone().exponential_(rate).min() for rate in (1.0, 1000.0)]
        least.append(torch._standard_gamma(torch.full_like(empty[:100_000], 0.05)).min())
        noise = -empty.clone().exponential_().log()
        by_hand = -torch.log(-torch.log(torch.rand(count, dtype=dtype, device=device)))
        assert min(value.item() for value in least) > 0, dtype
        assert noise.max().item() < 17, dtype  # -log(2**-24) is 16.6
        assert by_hand.max().item() < 17, dtype


def test_uniform_halves_have_the_resolution_of_torch():
    for dtype, bits in ((torch.float16, 11), (torch.bfloat16, 8)):
        (values,) = draw([("uniform_", dtype, 0.0, 1.0)], count=100_000)
        steps = values.double() * 2**bits
        assert torch.equal(steps, steps.round())
        assert values.max().item() == torch.rand(1_000_000, dtype=dtype).max().item()


def test_a_number_beside_a_tensor():
    drawn = run("normal.float_Tensor", 3.0, torch.full((COUNT,), 2.0))[0]
    assert distance(drawn, NORMAL(3.0, 2.0).cdf) < 1.63
    drawn = run("bernoulli.p", torch.zeros(COUNT), 0.3)[0]
    assert drawn.mean().item() == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / COUNT))


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


SMALL = [
    ("random_.to", torch.int64, 10),
    ("random_.to", torch.float32, 10),
    ("random_.to", torch.uint8, 256),
    ("random_.from", torch.int32, -5, 6),
    ("random_.from", torch.bfloat16, -5, 6),
]


def test_integers_take_each_value_of_a_small_range():
    for (_, dtype, *ends), values in zip(SMALL, draw(SMALL), strict=True):
        low, high = (0, *ends)[-2:]
        counts = torch.bincount(values.to(torch.int64) - low, minlength=high - low)
        assert counts.numel() == high - low, dtype
        expected = COUNT / (high - low)
        assert (counts - expected).abs().max() < 5 * math.sqrt(expected), dtype


WIDE: list[tuple[tuple[Any, ...], int, int]] = [
    (("random_", torch.int64), 0, 2**63),
    (("random_", torch.int32), 0, 2**31),
    (("random_", torch.uint8), 0, 256),
    (("random_", torch.bool), 0, 2),
    (("random_", torch.float32), 0, 2**24),
    (("random_", torch.bfloat16), 0, 2**8),
    (("random_.from", torch.int64, 5, None), 5, 2**63),
    (("random_.from", torch.int64, -(2**63), None), -(2**63), 2**63),
    (("random_.from", torch.int64, 2**40, 2**50), 2**40, 2**50),
    (("random_.from", torch.float32, 3, None), 3, 2**24),
]
"""Call, and the ends of its range."""


def test_integers_fill_a_wide_range():
    for (call, low, high), drawn in zip(WIDE, draw([call for call, *_ in WIDE]), strict=True):
        values, span = drawn.double(), float(high - low)
        assert low <= values.min() <= low + 0.01 * span, call
        assert high - 0.01 * span - 1 <= values.max() <= high, call
        assert span <= COUNT or distance(values, lambda x, low=low, span=span: (x - low) / span) < 2, call


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


WEIGHTS = torch.tensor([[1.0, 0.0, 2.0, 1.0], [0.0, 0.0, 0.0, 3.0]])


def test_multinomial_without_replacement():
    many = WEIGHTS[0].expand(6000, 4).contiguous()
    first, second = run("multinomial", many, 2)[0].unbind(1)
    assert (first != second).all()
    assert not (first == 1).any()
    assert (first == 2).double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert (second[first == 2] == 0).double().mean().item() == pytest.approx(0.5, abs=0.04)
    one = run("multinomial", WEIGHTS[0], 3)[0]
    assert sorted(one.tolist()) == [0, 2, 3]


def test_dirichlet_gradient():
    """torch's expansion is good to three digits; the numbers are of mpmath, by a difference of 40 digits."""
    size = 200
    alpha, other = (10 ** sample(size, low=-2.0, high=3.0, seed=seed).double() for seed in (1, 2))
    x = torch.distributions.Beta(alpha, other).sample().clamp(1e-6, 1 - 1e-6)
    check("_dirichlet_grad", x, alpha, alpha + other, rtol=5e-3, atol=1e-6)
    exact = [
        (0.48289860675347585, 927.8876828899921, 989.0286658869011, 0.0005212332057775115),
        (0.07082013822223614, 5.044718409122814, 121.98178598110886, 0.010746461441635628),
        (0.9997473237150627, 708.3779088711224, 0.45147588230385627, 0.0014120439953952927),
        (0.8201651490285634, 1.9811379426258238, 1.329628866233697, 0.42813874397033264),
    ]
    x, alpha, other, expected = torch.tensor(exact, dtype=torch.float64).T
    (found,) = run("_dirichlet_grad", x, alpha, alpha + other)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)


def test_gamma_gradient():
    # torch and XLA expand the derivative differently; both are good to three digits.
    check("_standard_gamma_grad", sample(50, low=0.3, high=4.0), sample(50, low=0.1, high=5.0), rtol=2e-3, atol=2e-4)
