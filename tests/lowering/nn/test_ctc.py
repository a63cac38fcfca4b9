"""The CTC loss of half types, and of targets that do not fit; torch's operator database has ordinary calls."""

from __future__ import annotations

import torch
from harness import check, run, sample, together

import xla_amp.lowering.nn.loss  # noqa: F401  (fills the table)

LENGTHS = ([8, 6, 3, 8], [3, 2, 0, 4])
REPEATED = torch.tensor([[1, 1, 2, 0], [3, 2, 0, 0], [0, 0, 0, 0], [4, 4, 4, 1]])


def case(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    log_probs = sample(8, 4, 5, dtype=dtype).log_softmax(-1)
    return log_probs, REPEATED, *map(torch.tensor, LENGTHS)


def test_half_types_are_computed_in_float32():
    """The loss and the gradient are float32's of the same probabilities, rounded."""
    half = torch.bfloat16
    log_probs, targets, *lengths = case(torch.float32)
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
def test_targets_that_do_not_fit(zero_infinity):
    log_probs, targets, _, target_lengths = case(torch.float64)
    short = torch.tensor([2, 6, 3, 6])  # 3 labels in 2 steps; 4 labels of which 3 are equal in 6
    check("_ctc_loss.Tensor", log_probs, targets, short, target_lengths, skip=[1])
    loss, alpha = torch.ops.aten._ctc_loss(log_probs, targets, short.tolist(), LENGTHS[1])
    assert loss.isinf().tolist() == [True, False, False, False]
    for row, steps in enumerate(short):
        alpha[row, steps:] = -torch.inf
        alpha[row, :, 2 * LENGTHS[1][row] + 1 :] = -torch.inf
    grad = sample(4, dtype=torch.float64)
    check("_ctc_loss_backward.Tensor", grad, log_probs, targets, short, target_lengths, loss, alpha, 0, zero_infinity)
