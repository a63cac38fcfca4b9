"""Results whose size depends on data, and questions about values: one wait each, unless the host knows the values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same
from torch.nn import functional as F

import xla_amp
from xla_amp import lazy as engine
from xla_amp.lazy.ops import dynamic_shape
from xla_amp.lazy.programs import execute
from xla_amp.lazy.steps import step_marker
from xla_amp.testing import counts as counted

pytestmark = pytest.mark.filterwarnings("ignore:the size of what:UserWarning")
NUMBERS = torch.tensor([3, 1, 1, 4, 0, 4, 4, 1])

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bincount": lambda x: torch.bincount(x, minlength=7),
    "nonzero": torch.nonzero,
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
    "unique_dim": lambda x: torch.unique(x.view(4, 2), dim=0, return_counts=True),
    "where": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "masked_select": lambda x: x.masked_select(x > 1),
}


def computed(device: torch.device) -> torch.Tensor:
    """`NUMBERS`, as values that only the device knows."""
    return NUMBERS.float().to(device).long()


@pytest.mark.parametrize("name", CALLS)
def test_same_as_the_cpu_with_one_wait(name, device):
    assert_same(lambda where: CALLS[name](NUMBERS.float().to(where).long()))
    x = computed(device)
    with counted() as counts:
        CALLS[name](x)
    assert counts.host_syncs == 1


def test_nobody_waits_for_what_was_uploaded(device):
    def results(where: Any) -> dict[str, Any]:
        return {name: call(NUMBERS.to(where) + 0) for name, call in CALLS.items()}

    with counted() as counts, warnings.catch_warnings():
        warnings.simplefilter("error")
        results(device)
    assert (counts.host_syncs, counts.executions, counts.host_values) == (0, 0, len(CALLS))
    assert_same(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_weights_of_bins_are_not_read(device, dtype):
    """The size depends on the bins alone: those that were uploaded are known, the device's are one wait."""

    def results(where: Any) -> Any:
        weights = (NUMBERS.to(where) * 0.5).sqrt().to(dtype)
        return [torch.bincount(x, weights, 7) for x in (NUMBERS.to(where), NUMBERS.to(where).int())]

    with counted() as counts, warnings.catch_warnings():
        warnings.simplefilter("error")
        results(device)
    assert (counts.host_syncs, counts.executions) == (0, 0)
    assert_same(results, rtol=1e-6)
    with counted() as counts:
        torch.bincount(computed(device), computed(device).sqrt())
    assert counts.host_syncs == 1
    with pytest.raises(RuntimeError, match="same length"):
        torch.bincount(NUMBERS.to(device), torch.ones(3, device=device))


STATIC: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero_static": lambda x: torch.nonzero_static(x, size=9, fill_value=-2),
    "one_hot": lambda x: F.one_hot(x, 6),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x, output_size=18),
    "histc": lambda x: torch.histc(x.double(), 4),
    "histogram": lambda x: torch.histogram(x.double(), 4),
    "combinations": lambda x: torch.cartesian_prod(x, x),
}


def test_results_of_fixed_size_do_not_wait(device):
    def results(where: Any) -> dict[str, Any]:
        return {name: call(NUMBERS.to(where) + 0) for name, call in STATIC.items()}

    with counted() as counts:
        results(device)
    assert counts.host_syncs == 0
    assert_same(results)


def test_each_operation_is_announced_once(device, monkeypatch):
    monkeypatch.setattr(dynamic_shape, "_announced", set())
    x = computed(device)
    with pytest.warns(UserWarning, match="nonzero returns depends on data"):
        torch.nonzero(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.nonzero(x)
    with pytest.warns(UserWarning, match="_unique2"):
        torch.unique(x)


def test_a_gradient_that_waits_is_named(device, monkeypatch):
    monkeypatch.setattr(dynamic_shape, "_announced", set())
    x = torch.linspace(-1, 1, 8).to(device).requires_grad_()
    with pytest.warns(UserWarning, match=r"gradient \(ProdBackward0\)") as seen:
        x.prod().backward()
    assert [each.filename for each in seen] == ["<ProdBackward0>"]  # no line of the package
    torch.nonzero(x)


def test_gradients_flow_through_selections(device):
    def program(where: str) -> Any:
        x = torch.linspace(-1, 1, 8).to(where).requires_grad_()
        (x[x > 0].pow(2).sum() + x.masked_select(x < 0).sum()).backward()
        return x.grad

    assert_same(program)


def test_losses_over_a_mask_that_changes_are_two_programs_without_a_wait(device: torch.device) -> None:
    """The ways out that docs/pytorch.md shows, against `scores[mask]` on the CPU."""

    def step(scores: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.where(mask, scores, 0).sum() / mask.sum().clamp(min=1)
        best, _ = torch.where(mask, scores, -torch.inf).topk(4)
        return mean, torch.where(best > -torch.inf, best, 0).sum()

    found, expected = [], []
    with counted() as counts:
        for share in (0.1, 0.4, 0.9, 0.0, 1.0):
            scores, mask = torch.randn(5, 9), torch.rand(5, 9) < share
            found.append(step(scores.to(device), mask.to(device)))
            execute.sync()
            rows = [row[kept].sort(descending=True).values[:4] for row, kept in zip(scores, mask, strict=True)]
            kept = scores[mask]
            expected.append((kept.mean() if kept.numel() else torch.zeros(()), torch.cat(rows).sum()))
    assert counts.compilations <= 2
    assert counts.host_syncs == 0
    torch.testing.assert_close([[x.cpu() for x in pair] for pair in found], [list(pair) for pair in expected])


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_on_the_cpu_is_two_programs_whatever_its_sizes(device: torch.device, scaled: bool) -> None:
    """The fourth way out that docs/pytorch.md shows: the gradient comes back from the CPU."""

    def train(where: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 9).to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = xla_amp.GradScaler(device, init_scale=4.0, enabled=scaled and where == device)
        for count in range(1, 7):
            scores, target = model(torch.randn(8, 5).to(where)).cpu(), torch.rand(8, 9)
            loss = (scores[scores > 0][:count] * target.unique()[:count].mean()).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    expected = train("cpu")
    with counted() as counts:
        found = train(device)
    torch.testing.assert_close(found, expected)
    assert counts.compilations <= 4  # the first two steps differ: the optimizer begins, the scale exists
    assert counts.host_syncs == 6 * (3 if scaled else 1) + 2  # scaling it reads the scale


# ---- values that follow from uploads alone are computed on the host: correctly, and without a flush ------------------

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
