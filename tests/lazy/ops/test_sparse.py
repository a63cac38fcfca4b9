"""Sparse gradients on the lazy device, against torch's on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import compare
from torch import nn

from xla_amp.errors import MissingLoweringError
from xla_amp.testing import counts as counted

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's, once a process

WORDS = torch.tensor([[3, 1, 3], [0, 3, 5]])


def sparse(device: Any, dtype: torch.dtype = torch.float32, sparse_dim: int = 1) -> torch.Tensor:
    """(6, 4) or (6, 4, 2); several entries have one place, and one entry is zero."""
    places = torch.tensor([[5, 0, 5, 2, 0, 5], [1, 3, 1, 0, 2, 0]])[:sparse_dim]
    values = torch.arange(-4.0, 8.0).reshape(6, 2) if sparse_dim == 2 else torch.arange(-8.0, 16.0).reshape(6, 4)
    size = (6, 4, 2)[: sparse_dim + 1]
    return torch.sparse_coo_tensor(places, values.to(dtype), size, device=device, check_invariants=True)


def dense(device: Any) -> torch.Tensor:
    return torch.linspace(-1, 1, 24).reshape(6, 4).to(device)


OPERATIONS: dict[str, Callable[[Any], torch.Tensor]] = {
    "coalesce": lambda d: sparse(d).coalesce(),
    "coalesce two sparse dimensions": lambda d: sparse(d, sparse_dim=2).coalesce(),
    "coalesce float16": lambda d: sparse(d, torch.float16).coalesce(),
    "coalesce twice": lambda d: (sparse(d).coalesce() + sparse(d)).coalesce(),
    "coalesce nothing": lambda d: torch.sparse_coo_tensor(torch.zeros(1, 0).long(), torch.ones(0), (3,), device=d),
    "dense plus sparse": lambda d: dense(d) + sparse(d),
    "dense plus coalesced in place": lambda d: dense(d).add_(sparse(d).coalesce(), alpha=-0.5),
    "view plus sparse in place": lambda d: dense(d).t().contiguous().t().add_(sparse(d)),
    "sparse plus sparse": lambda d: torch.add(sparse(d), sparse(d).coalesce(), alpha=2),
    "sparse plus sparse in place": lambda d: sparse(d).add_(sparse(d)),
    "times a number": lambda d: sparse(d) * 3,
    "times a tensor in place": lambda d: sparse(d).mul_(torch.tensor(0.5).to(d)),
    "by a number in place": lambda d: sparse(d).div_(4.0),
    "by a tensor": lambda d: sparse(d).coalesce() / torch.tensor(4.0).to(d),
    "negative": lambda d: -sparse(d),
    "masked": lambda d: dense(d).sparse_mask(sparse(d).coalesce()),
    "masked by two sparse dimensions": lambda d: (
        torch.ones(6, 4, 2).to(d).sparse_mask(sparse(d, sparse_dim=2).coalesce())
    ),
    "to_dense": lambda d: sparse(d, sparse_dim=2).to_dense(),
    "clone": lambda d: sparse(d).clone().mul_(0) + sparse(d),
    "deepcopy": lambda d: copy.deepcopy(sparse(d)),
    "to another dtype": lambda d: sparse(d).to(torch.float64),
    "moved": lambda d: sparse("cpu").to(d).cpu().to(d),
    "copy_": lambda d: sparse(d).mul_(0).copy_(sparse("cpu")),
    "zero_": lambda d: sparse(d).zero_(),
    "zeros_like": lambda d: torch.zeros_like(sparse(d)),
}


def test_operations(device: torch.device) -> None:
    for name, (ours, theirs) in {name: (call(device), call("cpu")) for name, call in OPERATIONS.items()}.items():
        assert (ours.layout, ours.dtype, ours.shape) == (theirs.layout, theirs.dtype, theirs.shape), name
        assert ours.device == device, name
        ours = ours.cpu()
        if theirs.layout is torch.sparse_coo:
            assert ours.is_coalesced() == theirs.is_coalesced(), name
            ours, theirs = ours.coalesce(), theirs.coalesce()
            assert torch.equal(ours.indices(), theirs.indices()), name
            ours, theirs = ours.values(), theirs.values()
        compare(ours, theirs, rtol=1e-6, atol=1e-6, where=name)


def test_coalescing_waits_for_nothing_and_keeps_the_size(device: torch.device) -> None:
    tensor = sparse(device)
    with counted() as counts:
        tensor = tensor.coalesce()
    assert counts.host_syncs == 0
    # places 0, 2, 5, and three entries past the end
    assert tensor.indices().tolist() == [[0, 2, 5, 6, 6, 6]]
    assert tensor.values()[3:].eq(0).all()
    assert tensor.cpu()._nnz() == 3
    assert "nnz=3" in repr(tensor)
    assert "device='jax:0'" in repr(tensor)


def test_a_sum_that_float16_does_not_hold(device: torch.device) -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.full((2, 3), 6e4).half(), (2, 3), device=device)
    assert tensor.coalesce().values()[0].isinf().all()


@pytest.mark.parametrize("padding", [None, 3])
def test_gradients_of_an_embedding(device: torch.device, padding: int | None) -> None:
    torch.manual_seed(0)
    theirs = nn.Embedding(6, 4, padding_idx=padding, sparse=True)
    ours = copy.deepcopy(theirs).to(device)
    weights = torch.randn(2, 3, 4)
    for model, where in ((ours, device), (theirs, "cpu")):
        for words in (WORDS, WORDS.flip(0)):  # the second one adds to the first
            (model(words.to(where)).square() * weights.to(where)).sum().backward()
    assert ours.weight.grad.layout is torch.sparse_coo
    found, expected = ours.weight.grad.cpu().coalesce(), theirs.weight.grad.coalesce()
    assert torch.equal(found.indices(), expected.indices())
    torch.testing.assert_close(found.values(), expected.values())


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_gradients_of_bags(device: torch.device, mode: str, padding: int | None) -> None:
    torch.manual_seed(0)
    theirs = nn.EmbeddingBag(6, 4, mode="mean" if mode == "mean" else "sum", padding_idx=padding, sparse=True)
    ours = copy.deepcopy(theirs).to(device)
    words, offsets, scales = WORDS.flatten(), torch.tensor([0, 2, 2]), torch.rand(6)
    for model, where in ((ours, device), (theirs, "cpu")):
        given = scales.to(where) if mode == "weighted" else None
        model(words.to(where), offsets.to(where), given).square().sum().backward()
    assert ours.weight.grad.layout is torch.sparse_coo
    torch.testing.assert_close(ours.weight.grad.to_dense().cpu(), theirs.weight.grad.to_dense())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD in a loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "SparseAdam maximize": lambda p: torch.optim.SparseAdam(p, lr=torch.tensor(0.1), maximize=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(device: torch.device, name: str) -> None:
    torch.manual_seed(0)
    theirs = nn.Embedding(6, 4, sparse=True)
    ours = copy.deepcopy(theirs).to(device)
    for model, where in ((ours, device), (theirs, "cpu")):
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(4):
            model((WORDS + step).remainder(6).to(where)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.weight.detach().cpu(), theirs.weight.detach(), rtol=2e-6, atol=2e-6)


def test_batches_with_other_numbers_of_rows_share_an_executable(device: torch.device) -> None:
    model = nn.Embedding(6, 4, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step(words: list[int]) -> None:
        optimizer.zero_grad()
        model(torch.tensor(words).to(device)).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step([0, 1, 2, 3])
    with counted() as counts:
        for words in ([4, 4, 4, 4], [5, 0, 5, 0], [3, 2, 1, 0]):
            step(words)
    assert counts.executions == 3
    assert (counts.host_syncs, counts.fallbacks) == (0, 0)


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "an operation without a kernel": (
        lambda d: sparse(d).abs(),
        MissingLoweringError,
        r"aten.abs.*to_dense\(\).*sparse=False",
    ),
    "sparse times sparse": (lambda d: sparse(d) * sparse(d), MissingLoweringError, "single number"),
    "sparse plus dense": (lambda d: sparse(d) + dense(d), RuntimeError, r"Use add\(dense, sparse\)"),
    "shapes": (lambda d: dense(d)[:2] + sparse(d), RuntimeError, "same size"),
    "shapes of a mask": (lambda d: dense(d)[:2].sparse_mask(sparse(d)), RuntimeError, "sizes"),
    "a sparse one to be masked": (lambda d: sparse(d).sparse_mask(sparse(d)), MissingLoweringError, "to_dense"),
    "dense into sparse": (lambda d: sparse(d).copy_(dense(d)), RuntimeError, "to_dense"),
    "frequencies": (
        lambda d: nn.Embedding(6, 4, scale_grad_by_freq=True, sparse=True).to(d)(WORDS.to(d)).sum().backward(),
        RuntimeError,
        "scale_grad_by_freq",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(device: torch.device, name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call(device)
