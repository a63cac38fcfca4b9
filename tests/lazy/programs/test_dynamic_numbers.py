"""Python numbers as data: indices, shifts, diagonals, exponents and the parameters of losses do not compile again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from xla_amp.testing import counts as counted

VALUES = torch.arange(440.0).reshape(40, 11)  # a shape of this test only


def _set_column(x: torch.Tensor, i: int) -> torch.Tensor:
    x = x.clone()
    x[:, i : i + 1] = float(i)
    return x


def _set_row(x: torch.Tensor, i: int) -> torch.Tensor:
    x = x * 1
    x[i] = x[i + 1]
    return x


CASES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "x[i]": lambda x, i: x[i] * 2,
    "x[:, i]": lambda x, i: x[:, i] * 3,
    "x[4i:4i+4]": lambda x, i: x[4 * i : 4 * i + 4] * 5,
    "x[i:i+6:2]": lambda x, i: x[i : i + 6 : 2] * 6,
    "narrow": lambda x, i: x.narrow(1, i, 2).t() @ x.narrow(1, i, 2),
    "view": lambda x, i: x.view(4, 10, 11)[..., i] * 7,
    "roll": lambda x, i: x.roll(i, 0)[:3] * 8,
    "roll of two": lambda x, i: x.roll((i, -2 * i), (0, 1))[:5] * 9,
    "tril": lambda x, i: torch.tril(x, diagonal=i - 3) * 11,
    "triu": lambda x, i: x.triu(-i) * 12,
    "pow": lambda x, i: (x / 440) ** i,
    "pad": lambda x, i: F.pad(x, (i, 9 - i)) * 13,
    "slice_scatter": lambda x, i: torch.slice_scatter(x, x[:2], 0, i, i + 2),
    "select_scatter": lambda x, i: torch.select_scatter(x, x[0], 0, i),
    "set a column": _set_column,
    "set a row": _set_row,
    "index_fill": lambda x, i: x.index_fill(0, torch.tensor([1, 2]).to(x.device), i),
    "huber_loss": lambda x, i: F.huber_loss(x / 99, x.flip(0) / 99, delta=1 + 0.25 * i),
    "smooth_l1_loss": lambda x, i: F.smooth_l1_loss(x / 99, x.flip(0) / 99, beta=0.25 + 0.5 * i),
    "float exponent": lambda x, i: (x / 440) ** (1.25 + 0.5 * i),
    "float exponent in place": lambda x, i: (x / 440).pow_(1.25 + 0.5 * i),
    "layer_norm, eps": lambda x, i: F.layer_norm(x / 99, [11], eps=0.125 + i),
    "group_norm, eps": lambda x, i: F.group_norm(x[:, :, None] / 99, 11, eps=0.125 + i),
    "batch_norm, eps": lambda x, i: F.batch_norm(
        x / 99, x[0].detach() * 0, x[0].detach() + 1, training=i > 8, eps=0.125 + i
    ),
    "correction": lambda x, i: x.var(1, correction=0.5 * i),
    "arange": lambda x, i: torch.arange(i, i + 4, device=x.device) * x[:4, 0],
}
DIFFERENTIABLE = (
    "huber_loss",
    "smooth_l1_loss",
    "float exponent",
    "layer_norm, eps",
    "batch_norm, eps",
    "x[i]",
    "x[:, i]",
    "x[4i:4i+4]",
    "x[i:i+6:2]",
    "narrow",
    "roll",
    "tril",
    "pad",
    "slice_scatter",
)


def _gradient(name: str) -> Callable[[torch.Tensor, int], torch.Tensor]:
    def gradient(x: torch.Tensor, i: int) -> torch.Tensor:
        x = (x / 4400).requires_grad_()
        CASES[name](x, i).sin().sum().backward()
        assert x.grad is not None
        return x.grad

    return gradient


CASES |= {f"gradient of {name}": _gradient(name) for name in DIFFERENTIABLE}


@pytest.mark.parametrize("name", CASES)
def test_two_programs_for_all_values(device: torch.device, name: str) -> None:
    body = CASES[name]
    x = VALUES.to(device)
    with counted() as counts:
        got = [body(x, i).cpu() for i in range(9)]
    tolerance = 1e-4 if name.startswith("gradient") else 1e-5
    for i, value in enumerate(got):
        torch.testing.assert_close(value, body(VALUES.clone(), i), rtol=tolerance, atol=tolerance)
    assert counts.compilations <= (3 if name == "pow" else 2)  # torch's own other form of x ** 2


def test_a_schedule_of_dropout_is_data(device: torch.device) -> None:
    """Its share of zeros, and the scale of what is kept, forward and backward; also inside attention."""
    ones = torch.ones(100, 103, device=device).requires_grad_()
    query = torch.randn(1, 2, 37, 19).to(device)
    torch.manual_seed(0)
    with counted() as counts:
        for p in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0):
            kept = F.dropout(ones, p)
            (gradient,) = torch.autograd.grad(kept.sum(), ones)
            assert torch.equal(kept, gradient)
            assert kept.cpu().unique().tolist() == pytest.approx(sorted({0.0, 1 / (1 - p)} if 0 < p < 1 else {1.0 - p}))
            assert (kept == 0).float().mean().item() == pytest.approx(p, abs=0.03)
    assert counts.compilations <= 8
    with counted() as counts:
        for p in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
            weights = F.scaled_dot_product_attention(query, query, torch.ones_like(query), dropout_p=p)
            assert weights.mean().item() == pytest.approx(1, abs=0.25)
    assert counts.compilations <= 4


def test_the_range_of_random_integers_is_data(device: torch.device) -> None:
    def draw(high: int) -> list[int]:
        torch.manual_seed(high)
        return torch.randint(-3, high, (29,), device=device).tolist()

    with counted() as counts:
        drawn = {high: draw(high) for high in (1, 5, 77, 2**40)}
    assert counts.compilations == 2
    assert min(drawn[77]) >= -3
    assert max(drawn[77]) < 77
