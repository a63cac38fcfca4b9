"""Values that follow from uploads alone are computed on the host: correctly, and without a flush."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import xla_amp
from xla_amp import lazy as engine
from xla_amp.lazy.programs import execute
from xla_amp.lazy.steps import step_marker
from xla_amp.testing import counts as counted

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])

QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all": lambda m: bool(m.all()),
    "any_of_a_window": lambda m: bool((m[:, 2:] == 0).any()),
    "all_of_a_transpose": lambda m: bool(m.t()[1].bool().all()),
    "longest": lambda m: int(m.sum(1).max()),
    "with_a_factory": lambda m: bool((m.cumsum(1) == torch.arange(1, 5, device=m.device)).all()),
    "with_numbers": lambda m: (m * 2.5 - 1).sum().item(),
    "the_tensor_itself": lambda m: m[1, 2].item(),
    "after_a_write": lambda m: (m.clone().fill_(3)[0, 0]).item(),
    "equal": lambda m: torch.equal(m, m.clone()),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_same_as_the_cpu_and_nobody_waits(device: torch.device, name: str) -> None:
    on_device = MASK.to(device)
    pending = torch.ones(3, device=device) * 2
    with counted() as counts:
        got = QUESTIONS[name](on_device)
    assert got == QUESTIONS[name](MASK)
    assert (counts.executions, counts.host_syncs, counts.host_values) == (0, 0, 1)
    assert pending.tolist() == [2, 2, 2]


ONLY_THE_DEVICE: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "floats": lambda device: torch.ones(3).to(device).sum(),
    "random": lambda device: torch.randint(5, (3,), device=device).sum() + MASK.to(device).sum(),
    "an_earlier_step": lambda device: _after_a_cut(MASK.to(device) + 1).sum(),
    "overwritten": lambda device: _after_a_cut(MASK.to(device).add_(1)).sum(),
    "large": lambda device: torch.ones(1 << 18, dtype=torch.int64).to(device).sum(),
}


def _after_a_cut(tensor: torch.Tensor) -> torch.Tensor:
    engine.sync()
    return tensor


@pytest.mark.parametrize("name", ONLY_THE_DEVICE)
def test_what_only_the_device_knows(device: torch.device, name: str) -> None:
    x = ONLY_THE_DEVICE[name](device)
    with counted() as counts:
        x.item()
    assert (counts.host_syncs, counts.host_values) == (1, 0)


def test_a_write_is_seen_before_and_after_the_cut(device: torch.device) -> None:
    mask = MASK.to(device)
    assert not mask.all()
    mask[1, 2:] = 7
    assert mask.all()
    engine.sync()
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 7, 7]]
    mask.copy_(MASK)
    assert not mask.all()


def test_the_step_stays_one_executable(device: torch.device) -> None:
    """What models do with a padding mask: ask, then choose how to attend."""
    weight = torch.ones(4, 4).to(device).requires_grad_()

    def step() -> None:
        mask = MASK.to(device)
        scores = weight @ mask.float().t()
        loss = scores.sum() if mask.all() else scores.masked_fill(mask.t()[:, :1] == 0, 0).sum()
        loss.backward()
        engine.sync()

    step()
    with counted() as counts:
        step()
    assert (counts.executions, counts.host_syncs) == (1, 0)


def test_a_watched_step_shows_that_it_looks(device: torch.device) -> None:
    """A captured step must not depend on a value unseen."""
    with execute.flush_begins.subscribed(lambda run: None), step_marker.paused(), counted() as counts:
        assert not MASK.to(device).all()
    assert counts.host_syncs == 1


@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.cpu,
        torch.Tensor.tolist,
        lambda x: x[1:].cpu(),
        lambda x: (x > 1).tolist(),
        lambda x: torch.empty(3, dtype=torch.int64).copy_(x),
    ],
    ids=["cpu", "tolist", "view", "mask", "copy_"],
)
def test_a_whole_upload_is_read_without_a_wait(device: torch.device, read: Callable[[torch.Tensor], Any]) -> None:
    given = torch.tensor([1, 2, 3])
    uploaded = given.to(device)
    xla_amp.sync(wait=True)
    with counted() as counts:
        found = read(uploaded)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(read(given)))
        if isinstance(found, torch.Tensor):
            found.zero_()  # a copy: the host's own stays
        assert uploaded.tolist() == [1, 2, 3]
    assert counts.host_syncs == 0
