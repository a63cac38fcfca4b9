"""Several Python threads that record, flush, read and upload at once: right values, no lost or doubled work."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import array_behind
from torch import nn

from xla_amp import lazy as engine
from xla_amp.lazy.graph import trace


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*functions: Callable[[], None]) -> None:
    """Runs the functions in threads of their own; raises the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        try:
            start.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


def test_each_thread_cuts_while_others_record(device: torch.device) -> None:
    total = torch.zeros(3, device=device)

    def work() -> None:
        own = torch.zeros(5, device=device)
        for i in range(100):
            total.add_(1)
            own.add_(1)
            own[1:3].sub_(1)
            if i % 10 == 0:
                engine.sync()
        assert own.tolist() == [100, 0, 0, 100, 100]

    together(*[work] * 4)
    assert total.tolist() == [400] * 3


def test_threads_that_train(device: torch.device) -> None:
    def train(seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        weight = nn.Parameter(torch.randn(3, 2, generator=generator).to(device))
        x = torch.randn(4, 3, generator=generator).to(device)
        optimizer = torch.optim.Adam([weight], lr=0.1)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = (x @ weight).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    alone = [train(seed) for seed in range(3)]
    side_by_side: dict[int, list[float]] = {}
    together(*[lambda s=s: side_by_side.__setitem__(s, train(s)) for s in range(3)])
    for seed in range(3):
        assert side_by_side[seed] == pytest.approx(alone[seed], rel=1e-6)


def test_uploads_of_new_shapes_beside_new_operations(device: torch.device) -> None:
    """Both give identities to specs and instructions; two of one identity would mix programs up."""

    def load(rank: int) -> None:
        for i in range(1, 60):
            x = engine.to_device(torch.full((i,) + (1,) * rank, float(i)))
            assert x.shape[0] == i

    def compute() -> None:
        for i in range(1, 60):
            x = torch.full((1, 1, 1, 1, i), 2.0, device=device)
            y = x.view(-1) * 3
            if i % 20 == 0:
                assert y.tolist() == [6.0] * i

    together(*[lambda r=r: load(r) for r in range(5, 8)], compute)
    assert [instruction.id for instruction in trace.instructions.values()] == list(trace.instructions)


def _slow(device: torch.device) -> torch.Tensor:
    x = torch.ones(600, 600, device=device)
    for _ in range(60):
        x = (x @ x).tanh()
    engine.sync()
    return x


def test_waiting_does_not_hold_the_tape(device: torch.device) -> None:
    """While one thread waits for a slow program, another one records."""
    _slow(device).sum().item()
    x = _slow(device)
    waiting = threading.Thread(target=engine.sync, kwargs={"wait": True})
    waiting.start()
    y = torch.ones(3, device=device) + 1
    assert not array_behind(x).is_ready()
    waiting.join()
    assert array_behind(x).is_ready()
    assert y.tolist() == [2, 2, 2]
