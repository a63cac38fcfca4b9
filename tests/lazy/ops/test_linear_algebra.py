"""Linear algebra, parts of complex numbers and CTC on the device, through autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import Tensor, linalg
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from xla_amp import lazy as engine
from xla_amp.testing import counts as counted


def sample(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


MATRICES = sample(2, 4, 4)
POSITIVE = MATRICES @ MATRICES.mT + torch.eye(4, dtype=torch.float64)
VECTORS = sample(2, 4, 3)
LABELS = torch.tensor([[1, 2, 2, 3], [4, 1, 0, 0], [2, 2, 2, 0]])


def ctc(targets: Tensor, **options: Any) -> Callable[[Tensor], Tensor]:
    lengths = [8, 7, 8], [4, 2, 3]
    return lambda x: F.ctc_loss(x.log_softmax(-1), targets.to(x.device), *lengths, **options)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {  # others are in torch's operator database
    "det of a transpose": (lambda a: linalg.det(a.mT), (MATRICES,)),
    "slogdet of a transpose": (lambda a: linalg.slogdet(a.mT), (MATRICES,)),
    "solve of a transpose": (lambda a, b: linalg.solve(a.mT, b), (MATRICES, VECTORS)),
    "ctc, joined targets": (ctc(LABELS[LABELS != 0], reduction="sum"), (sample(8, 3, 5),)),
    "ctc, each": (ctc(LABELS, reduction="none", zero_infinity=True), (sample(8, 3, 5),)),
}


def with_gradients(name: str, where: str) -> Any:
    function, arguments = FUNCTIONS[name]
    operands = [x.to(where).requires_grad_() for x in arguments]
    results = tree_leaves(function(*operands))
    weighted = [(r * torch.linspace(1, 2, r.numel(), dtype=r.dtype).view(r.shape).to(where)).sum() for r in results]
    gradients = torch.autograd.grad(sum(w for w in weighted if w.requires_grad), operands)
    return results, gradients


def test_functions_and_gradients(device):
    assert_same(lambda where: {name: with_gradients(name, where) for name in FUNCTIONS}, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: linalg.cholesky(-a), "leading minor of order 1"),
        (lambda a: linalg.inv_ex(a - a, check_errors=True), "diagonal element 1 is zero"),
        (lambda a: linalg.solve(a - a, a), "singular"),
        (lambda a: linalg.lstsq(a, a, driver="fast"), "driver"),
        (lambda a: linalg.lstsq(a, a[:2]), "as many rows"),
        (lambda a: F.ctc_loss(a[:, None], a[:1].long(), [5], [1]), "input_lengths from 0 to 4"),
        (lambda a: F.ctc_loss(a[:, None], a[:1].long(), [4], [6]), "at least 6 columns"),
        (lambda a: a.to_sparse(), "only gradients of embeddings are sparse"),
    ],
)
def test_errors_are_raised_where_the_call_stands(call, words, device):
    with pytest.raises(RuntimeError, match=words):
        call(torch.eye(4, device=device))


def test_unchecked_factorizations_do_not_wait(device):
    a = POSITIVE.to(device)
    engine.sync()
    with counted() as counts:
        results = linalg.cholesky_ex(a), linalg.inv_ex(a), linalg.qr(a), linalg.lstsq(a, a), linalg.det(a)
        engine.sync()
    assert (counts.host_syncs, counts.executions) == (0, 1)
    del results


def test_lengths_of_ctc_are_data(device):
    log_probs = sample(8, 3, 5).to(device).log_softmax(-1)

    def loss(lengths: list[int]) -> Tensor:
        return F.ctc_loss(log_probs, LABELS.to(device), lengths, [4, 2, 3], reduction="none")

    engine.sync()
    loss([8, 8, 8]).cpu()
    with counted() as counts:
        other = loss([8, 7, 6]).cpu()
    assert counts.compilations == 0
    want = F.ctc_loss(log_probs.cpu(), LABELS, [8, 7, 6], [4, 2, 3], reduction="none")
    torch.testing.assert_close(other, want, rtol=1e-11, atol=0)
