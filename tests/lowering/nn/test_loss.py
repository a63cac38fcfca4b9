"""Losses and their gradients against torch on the CPU: bends, ignored classes, half types, targets that do not fit."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from harness import assert_same, check, check_rows, row, run, sample, together

NONE, MEAN, SUM = range(3)


def pair(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target; differences at and around the kinks of the losses."""
    x, target = sample(4, 5, dtype=dtype), sample(4, 5, dtype=dtype, seed=1)
    x[0, :4] = target[0, :4] + torch.tensor([0.0, 1.0, -1.0, 0.5], dtype=dtype)
    return x, target


def probabilities(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """With 0 and 1, at which a logarithm is cut off."""
    x, target = (torch.sigmoid(t.double()).to(dtype) for t in pair(torch.float64))
    x[1, :2] = torch.tensor([0.0, 1.0], dtype=dtype)
    return x, target


BENDS = [("huber_loss", 1.0), ("huber_loss", 0.5), ("smooth_l1_loss", 1.0), ("smooth_l1_loss", 0.5)]

ROWS = [
    *(row(name, "fb", lambda d, at=at: (*pair(d), NONE, at), wide=True) for name, at in BENDS),
    *(
        row(f"{name}_backward", "fb", lambda d, at=at: (sample(4, 5, dtype=d, seed=2), *pair(d), NONE, at), wide=True)
        for name, at in BENDS
    ),
    row("smooth_l1_loss", "fb", lambda d: (*pair(d), MEAN, 0.0), wide=True),
    row("binary_cross_entropy", "fb", lambda d: (*probabilities(d), None, NONE), wide=True),
    row("binary_cross_entropy_backward", "fb", lambda d: (sample(dtype=d), *probabilities(d), None, MEAN), wide=True),
]


def test_where_a_formula_changes() -> None:
    check_rows(ROWS)


@together("reduction", [NONE, MEAN, SUM])
def test_one_sample(reduction: int) -> None:
    x, weight = sample(5), sample(5, low=0.1, seed=3)
    for target in (torch.tensor(2), torch.tensor(-100)):  # all ignored: NaN for the mean
        check("nll_loss_forward", x, target, weight, reduction, -100)
        total = torch.ops.aten.nll_loss_forward(x, target, weight, reduction, -100)[1]
        check("nll_loss_backward", sample(seed=2), x, target, weight, reduction, -100, total)


def test_margins_of_classes() -> None:
    """Of one row and several; targets after the first -1 do not count."""
    several = sample(2, 5), torch.tensor([[1, 2, -1, 0, 0], [-1, 4, 3, 2, 1]])

    def losses(where: str) -> list[torch.Tensor]:
        found = []
        for reduction, rows in itertools.product(("none", "mean", "sum"), (0, slice(2))):
            x, listed = (each[rows].clone().to(where) for each in several)
            x.requires_grad_()
            own, weight = torch.tensor([2, 4])[rows].to(where), sample(5, low=0.1, seed=3).to(where)
            several_margins = F.multilabel_margin_loss(x, listed, reduction=reduction)
            one_margin = F.multi_margin_loss(x, own, p=2, weight=weight, reduction=reduction)
            found += [several_margins, one_margin, *torch.autograd.grad((several_margins + 2 * one_margin).sum(), x)]
        return found

    assert_same(losses, rtol=1e-5, atol=1e-6)


def test_infinite_log_probability_of_an_ignored_class_stays_out() -> None:
    x = sample(2, 3)
    x[1] = -torch.inf
    check("nll_loss_forward", x, torch.tensor([1, -100]), None, SUM, -100)


def test_halves_are_summed_in_float32() -> None:
    # 4096 ones: a bfloat16 running sum would stop at 256
    ones = torch.ones(4096, dtype=torch.bfloat16)
    check("mse_loss", ones, torch.zeros_like(ones), SUM, wide=True, rtol=0, atol=0)
    assert sum([torch.ones((), dtype=torch.bfloat16)] * 4096).item() == 256


LENGTHS = ([8, 6, 3, 8], [3, 2, 0, 4])
REPEATED = torch.tensor([[1, 1, 2, 0], [3, 2, 0, 0], [0, 0, 0, 0], [4, 4, 4, 1]])


def ctc(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    log_probs = sample(8, 4, 5, dtype=dtype).log_softmax(-1)
    return log_probs, REPEATED, *map(torch.tensor, LENGTHS)


def test_ctc_of_half_types_is_computed_in_float32():
    """The loss and the gradient are float32's of the same probabilities, rounded."""
    half = torch.bfloat16
    log_probs, targets, *lengths = ctc(torch.float32)
    log_probs, grad = log_probs.to(half), sample(4, dtype=torch.float32).to(half)
    loss, alpha = torch.ops.aten._ctc_loss(log_probs.float(), targets, *LENGTHS)
    exact = torch.ops.aten._ctc_loss_backward(grad.float(), log_probs.float(), targets, *LENGTHS, loss, alpha, 0)
    low, low_alpha = run("_ctc_loss.Tensor", log_probs, targets, *lengths)
    arguments = (grad, log_probs, targets, *lengths, low, low_alpha, 0)
    (got,) = run("_ctc_loss_backward.Tensor", *arguments)
    eps = torch.finfo(half).eps
    torch.testing.assert_close(low, loss.to(half), rtol=eps, atol=eps)
    torch.testing.assert_close(got, exact.to(half), rtol=eps, atol=eps)


@together("zero_infinity", [False, True])
def test_ctc_of_targets_that_do_not_fit(zero_infinity):
    log_probs, targets, _, target_lengths = ctc(torch.float64)
    short = torch.tensor([2, 6, 3, 6])  # 3 labels in 2 steps; 4 labels of which 3 are equal in 6
    check("_ctc_loss.Tensor", log_probs, targets, short, target_lengths, skip=[1])
    loss, alpha = torch.ops.aten._ctc_loss(log_probs, targets, short.tolist(), LENGTHS[1])
    assert loss.isinf().tolist() == [True, False, False, False]
    for sequence, steps in enumerate(short):
        alpha[sequence, steps:] = -torch.inf
        alpha[sequence, :, 2 * LENGTHS[1][sequence] + 1 :] = -torch.inf
    grad = sample(4, dtype=torch.float64)
    check("_ctc_loss_backward.Tensor", grad, log_probs, targets, short, target_lengths, loss, alpha, 0, zero_infinity)
