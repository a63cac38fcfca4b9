"""Linear algebra and CTC through autograd, and operations that torch composes of others: they have no lowering.

Of those the operator database (tests/lazy/op_db) has all but windows, forms in place and assertions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same, sample
from torch import Tensor, linalg
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import xla_amp
from xla_amp import lazy as engine
from xla_amp.testing import counts as counted


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


MATRICES = normal(2, 4, 4)
POSITIVE = MATRICES @ MATRICES.mT + torch.eye(4, dtype=torch.float64)
VECTORS = normal(2, 4, 3)
LABELS = torch.tensor([[1, 2, 2, 3], [4, 1, 0, 0], [2, 2, 2, 0]])


def ctc(targets: Tensor, **options: Any) -> Callable[[Tensor], Tensor]:
    lengths = [8, 7, 8], [4, 2, 3]
    return lambda x: F.ctc_loss(x.log_softmax(-1), targets.to(x.device), *lengths, **options)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {  # others are in torch's operator database
    "det of a transpose": (lambda a: linalg.det(a.mT), (MATRICES,)),
    "slogdet of a transpose": (lambda a: linalg.slogdet(a.mT), (MATRICES,)),
    "solve of a transpose": (lambda a, b: linalg.solve(a.mT, b), (MATRICES, VECTORS)),
    "ctc, joined targets": (ctc(LABELS[LABELS != 0], reduction="sum"), (normal(8, 3, 5),)),
    "ctc, each": (ctc(LABELS, reduction="none", zero_infinity=True), (normal(8, 3, 5),)),
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
    log_probs = normal(8, 3, 5).to(device).log_softmax(-1)

    def loss(lengths: list[int]) -> Tensor:
        return F.ctc_loss(log_probs, LABELS.to(device), lengths, [4, 2, 3], reduction="none")

    engine.sync()
    loss([8, 8, 8]).cpu()
    with counted() as counts:
        other = loss([8, 7, 6]).cpu()
    assert counts.compilations == 0
    want = F.ctc_loss(log_probs.cpu(), LABELS, [8, 7, 6], [4, 2, 3], reduction="none")
    torch.testing.assert_close(other, want, rtol=1e-11, atol=0)


def windows(place: str) -> dict[str, Any]:
    made = {}
    for name in ("bartlett", "blackman", "hamming", "hann"):
        window = getattr(torch, f"{name}_window")
        for periodic in (True, False):
            for length, dtype in ((1, torch.float32), (8, torch.float32), (9, torch.float64)):
                made[f"{name} {periodic} {length}"] = window(length, periodic, dtype=dtype, device=place)
    made["alpha"] = torch.hamming_window(9, True, 0.6, device=place)
    made["alpha and beta"] = torch.hamming_window(9, False, 0.6, 0.3, device=place)
    return made


def test_windows(device: torch.device) -> None:
    assert_same(windows, rtol=1e-6, atol=1e-6)


def test_a_gamma_function_in_place(device: torch.device) -> None:
    assert_same(lambda place: (sample(4, 5).abs() + 3).to(place).polygamma_(1), rtol=1e-6, atol=1e-6)


POWERS = (0.0, 0.5, 1.0, 2.0, 3.0, float("inf"))


def test_points_that_coincide(device: torch.device) -> None:
    x, y = sample(2, 4, 3, dtype=torch.float64), sample(2, 5, 3, dtype=torch.float64, seed=1)
    x[:, 0] = x[:, 1]
    y[:, 2], y[:, 3, 1] = x[:, 1], x[:, 2, 1]

    def distances(where: str) -> list[torch.Tensor]:
        found = []
        for p in POWERS:
            a, b = (each.clone().to(where).requires_grad_() for each in (x, y))
            between, within = torch.cdist(a, b, p), torch.pdist(a[0], p)
            weights = torch.arange(1.0, 41, dtype=torch.float64, device=where).reshape(2, 4, 5)
            total = (between * weights).sum() + (within * weights.view(-1)[:6]).sum()
            found += [between, within, *torch.autograd.grad(total, (a, b))]
        return found

    assert_same(distances, rtol=1e-11, atol=1e-11)


def test_euclidean_distances_of_few_and_many_rows_and_no_points(device: torch.device) -> None:
    sizes = ((3, 3), (30, 3), (0, 3), (2, 0))
    modes = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")

    def distances(where: str) -> list[torch.Tensor]:
        found = []
        for rows, columns in sizes:
            x, y = (sample(n, columns, dtype=torch.float64, seed=n).to(where).requires_grad_() for n in (rows, 4))
            for mode in modes:
                between = torch.cdist(x, y, 2.0, mode)
                found += [between, *torch.autograd.grad(between.sum(), (x, y)), torch.pdist(x), torch.cdist(x, y, 1.0)]
        return found

    assert_same(distances, rtol=1e-6, atol=1e-7)


def test_an_assertion_waits_for_nothing_and_raises_after_a_later_program(device: torch.device) -> None:
    x = torch.arange(3.0).to(device).exp()
    with xla_amp.testing.counts() as counts:
        torch._assert_async((x > 0).all(), "holds")
        torch._assert_async((x > 100).any(), "too small")
        x = x + 1
    assert counts.host_syncs == counts.executions == 0
    with pytest.raises(RuntimeError, match=r"too small \(asserted at .*test_linear_algebra.py:\d+\)"):
        xla_amp.sync(wait=True)
    assert x.tolist() == pytest.approx([2.0, 3.718, 8.389], rel=1e-3)
    with pytest.raises(RuntimeError, match="with single nonzero value, but got zero"):
        torch._assert_async(torch.zeros(1, dtype=torch.bool).to(device))  # the host knows its value
    torch._assert_async((x > 200).any(), "read with another value")
    y = x * 2
    with pytest.raises(RuntimeError, match="read with another value"):
        y[0].item()


@pytest.mark.parametrize("end", ["", "xla_amp.sync()"])
def test_an_assertion_that_nothing_waits_for_is_reported_at_exit(end: str, tmp_path: Path) -> None:
    program = f"""
import torch, xla_amp
x = torch.arange(3.0).to(xla_amp.xla_device()).exp()
torch._assert_async((x > 0).all(), "holds")
torch._assert_async((x > 100).any(), "too small")
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "RuntimeError: too small" in done.stderr
    assert "holds" not in done.stderr.replace(program, "")
