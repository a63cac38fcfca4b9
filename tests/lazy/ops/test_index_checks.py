"""Indices out of range: those that were uploaded are refused, those that the device computed are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from xla_amp.testing import counts as counted

F = torch.nn.functional
CASES: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, ...]]] = {
    "cross_entropy": (lambda x, i: F.cross_entropy(x, i), (4, 3)),
    "embedding": (lambda x, i: F.embedding(i, x), (4, 3)),
    "embedding_bag": (lambda x, i: F.embedding_bag(i, x, i.new_zeros(1)), (4, 3)),
    "gather": (lambda x, i: x.gather(0, i[None]), (4, 3)),
    "index_add": (lambda x, i: x.index_add(0, i, x[:3]), (4, 3)),
    "index_copy": (lambda x, i: x.clone().index_copy_(0, i, x[:3]), (4, 3)),
    "index_reduce": (lambda x, i: x.index_reduce(0, i, x[:3], "amax"), (4, 3)),
    "index_select": (lambda x, i: x.index_select(0, i), (4, 3)),
    "multi_margin": (lambda x, i: F.multi_margin_loss(x.T, i), (4, 3)),
    "nll_loss2d": (lambda x, i: F.nll_loss(x[None, :, None], i[None, None]), (4, 3)),
    "one_hot": (lambda x, i: F.one_hot(i, 4), (4, 3)),
    "scatter": (lambda x, i: x.scatter(0, i[None], 2.0), (4, 3)),
    "scatter_add": (lambda x, i: x.scatter_add(0, i[None], x), (4, 3)),
    "scatter_multiply": (lambda x, i: x.scatter(0, i[None], x, reduce="multiply"), (4, 3)),
    "scatter_reduce": (lambda x, i: x.clone().scatter_reduce_(0, i[None], x, "amax"), (4, 3)),
    "scatter_src": (lambda x, i: x.scatter(0, i[None], x), (4, 3)),
}
FROM_THE_END: dict[str, Callable[[Any, Any], Any]] = {
    "index": lambda x, i: x[i],
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "index_put": lambda x, i: x.index_put((i,), x[0]),
    "put": lambda x, i: x[:, 0].clone().put_(i, x[0]),
    "set": lambda x, i: x.clone().__setitem__(i, 1.0),
    "take": lambda x, i: x[:, 0].take(i),
}
"""Operations whose negative indices count from the end."""


def arguments(name: str) -> tuple[Callable[[Any, Any], Any], torch.Tensor]:
    call, shape = CASES[name]
    rows = torch.arange(12.0).reshape(shape)
    return call, rows.T.contiguous() if name == "cross_entropy" else rows


def on_both(call: Callable[[Any, Any], Any], x: torch.Tensor, wrong: torch.Tensor, device: torch.device) -> str:
    """The message of the error that both devices raise, of one class."""
    with pytest.raises((IndexError, RuntimeError)) as of_cpu:
        call(x, wrong)
    with counted() as counts, pytest.raises(of_cpu.type) as caught:
        call(x.to(device), wrong.to(device))
    assert counts.host_syncs == 0
    return str(caught.value)


@pytest.mark.parametrize("bad", [4, -1])
@pytest.mark.parametrize("name", CASES)
def test_uploaded_indices_are_refused(device: torch.device, name: str, bad: int) -> None:
    call, x = arguments(name)
    good, wrong = torch.tensor([3, 0, 1]), torch.tensor([3, 0, bad])
    assert f"from 0 to 3, but got {bad}" in on_both(call, x, wrong, device)
    torch.testing.assert_close(call(x.to(device), good.to(device)).cpu(), call(x, good))


@pytest.mark.parametrize("bad", [4, -5])
@pytest.mark.parametrize("name", FROM_THE_END)
def test_uploaded_indices_from_the_end_are_refused(device: torch.device, name: str, bad: int) -> None:
    call, x = FROM_THE_END[name], torch.arange(12.0).reshape(4, 3)
    good, wrong = torch.tensor([-4, 3, -1]), torch.tensor([-4, 3, bad])
    assert f"from -4 to 3, but got {bad}" in on_both(call, x, wrong, device)
    if name != "set":
        torch.testing.assert_close(call(x.to(device), good.to(device)).cpu(), call(x, good))


def test_an_index_that_was_used_before_is_checked_again(device: torch.device) -> None:
    """In one step: the trace has read the index already."""
    x, index = torch.arange(12.0).reshape(4, 3).to(device), torch.tensor([3, 0]).to(device)
    kept = x[index]
    with pytest.raises(IndexError, match="from -3 to 2, but got 3"):
        x[:, index]
    with pytest.raises(IndexError, match="from -3 to 2, but got 3"):
        x[:, torch.tensor([3])]  # an index on the CPU
    assert kept.tolist() == [[9, 10, 11], [0, 1, 2]]


def test_only_the_part_that_is_used_counts(device: torch.device) -> None:
    x, index = torch.arange(12.0).reshape(4, 3), torch.tensor([9, 3, 0, 1, -7])
    got = x.to(device).index_select(0, index.to(device)[1:4])
    assert torch.equal(got.cpu(), x.index_select(0, index[1:4]))


@pytest.mark.parametrize("ignored", [-100, 7])
def test_ignored_targets_pass(device: torch.device, ignored: int) -> None:
    x, target = torch.arange(12.0).reshape(3, 4).sin(), torch.tensor([3, ignored, 1])
    got = F.cross_entropy(x.to(device), target.to(device), ignore_index=ignored)
    torch.testing.assert_close(got.cpu(), F.cross_entropy(x, target, ignore_index=ignored))
    with pytest.raises(IndexError, match="it is not ignore_index, which is -5"):
        F.cross_entropy(x.to(device), target.to(device), ignore_index=-5)


def test_indices_from_the_device_are_not_looked_at(device: torch.device) -> None:
    """The twin, and what the page on support says of these: no wait, and no memory of anything else."""
    x = torch.arange(12.0).reshape(4, 3)
    index = torch.tensor([3, 0, 4]).to(device) + torch.zeros(3, dtype=torch.int64, device=device)
    with counted() as counts:
        read = x.to(device).index_select(0, index)
        written = torch.zeros(4, 3, device=device).index_add(0, index, torch.ones(3, 3, device=device))
    assert counts.host_syncs == 0
    assert torch.equal(read.cpu()[:2], x[[3, 0]])
    assert written.cpu().sum(1).tolist() == [3, 0, 0, 3]
