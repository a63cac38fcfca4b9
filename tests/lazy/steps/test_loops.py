"""Loops without an optimizer: few programs for any length, and training steps that stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from xla_amp import lazy as engine
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute
from xla_amp.lazy.steps import loops
from xla_amp.testing import counts as counted

LENGTHS = (7, 100, 400)


def network(width: int) -> nn.Module:
    """A network whose programs no other test compiles, if no other has this width."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 5, generator=generator), torch.arange(4) % 3) for _ in range(count)]


def correct(model: nn.Module, where: Any, count: int, mode: Callable[[], Any]) -> int:
    total: Any = 0
    with mode():
        for x, y in batches(count):
            x, y = x.to(where), y.to(where)
            total += (model(x).argmax(-1) == y).sum()
    return int(total.item())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_is_two_programs_of_any_length(device: torch.device, mode: Callable[[], Any]) -> None:
    width = 17 if mode is torch.no_grad else 18
    model = network(width)
    expected = [correct(model, "cpu", count, mode) for count in LENGTHS]
    model.to(device)
    executions = []
    with counted() as counts:
        for count, wanted in zip(LENGTHS, expected, strict=True):
            with counted() as each:
                assert correct(model, device, count, mode) == wanted
            executions.append(each.executions)
            assert each.host_syncs == 1
    assert counts.compilations <= 2
    assert executions[2] - executions[1] == 300  # one for each batch


def test_an_evaluation_that_records_a_graph(device: torch.device) -> None:
    """The first program holds 16 or more batches, because these might be parts of an accumulated gradient."""
    model = network(19).to(device)
    with counted() as counts:
        for count in (100, 400):
            correct(model, device, count, torch.enable_grad)
    assert counts.compilations <= 3
    assert counts.executions > 400


def features(where: Any, count: int) -> torch.Tensor:
    model = network(20).requires_grad_(False).to(where)
    return torch.cat([model(x.to(where)) for x, _ in batches(count)])


def several_sums(where: Any, count: int) -> torch.Tensor:
    hits, sizes = torch.zeros(3, device=where), torch.zeros(3, device=where)
    for x, y in batches(count):
        guess, true = (x[:, :3] > 0).float().to(where), nn.functional.one_hot(y, 3).to(where)
        hits += (guess * true).sum(0)
        sizes += guess.sum(0)
    return hits / sizes


def denoising(where: Any, count: int) -> torch.Tensor:
    model, x = nn.Sequential(nn.Linear(5, 21), nn.SiLU(), nn.Linear(21, 5)), torch.ones(4, 5)
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.01 * (index + 1))
    model, x = model.to(where), x.to(where)
    with torch.no_grad():
        for step in range(count):
            x = x - 0.1 * model(x * (1 - step / count))
    return x


def running_average(where: Any, count: int) -> torch.Tensor:
    average = torch.zeros(5, device=where)
    for x, _ in batches(count):
        average.mul_(0.9).add_(x.to(where).mean(0), alpha=0.1)
    return average


def plain_tensors(where: Any, count: int) -> torch.Tensor:
    x = torch.ones(4, 6, device=where)
    for step in range(count):
        x = (x * 0.99 + step).roll(step, 1)
    return x


def update_by_hand(where: Any, count: int) -> torch.Tensor:
    weight = torch.ones(5, 2, device=where, requires_grad=True)
    for x, _ in batches(count):
        (x.to(where) @ weight).square().mean().backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad
            weight.grad = None
    return weight.detach()


@pytest.mark.parametrize("program", [features, several_sums, denoising, running_average, plain_tensors, update_by_hand])
def test_other_loops(device: torch.device, program: Callable[..., torch.Tensor]) -> None:
    lengths = (60, 130)
    with counted() as first:
        torch.testing.assert_close(program(device, lengths[0]).cpu(), program("cpu", lengths[0]))
    with counted() as second:
        torch.testing.assert_close(program(device, lengths[1]).cpu(), program("cpu", lengths[1]))
    assert first.compilations <= 4
    assert second.compilations <= (1 if program is features else 0)  # `cat` of more parts
    assert second.executions - first.executions == lengths[1] - lengths[0]


def test_an_accumulated_gradient_is_one_program(device: torch.device) -> None:
    model = network(22).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for x, _ in batches(8):
            model(x.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with counted() as counts:
        for _ in range(4):
            step()
    assert (counts.executions, counts.compilations, counts.host_syncs) == (4, 0, 0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = torch.tanh(self.cell(x))
        return x


def test_time_steps_of_a_training_step_are_one_program(device: torch.device) -> None:
    model, x = Recurrent().to(device), torch.ones(2, 5).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with counted() as counts:
        for _ in range(3):
            model(x, 30).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.sync()
    assert counts.executions == 3


def test_equal_layers_are_no_loop(device: torch.device) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(40))).to(device)
    with torch.no_grad(), counted() as counts:
        model(torch.ones(2, 5).to(device)).sum().item()
    assert counts.executions == 1


def test_a_loop_inside_a_loop_gives_way_to_it(device: torch.device) -> None:
    """Time steps of an evaluated network; the larger loop is taken from its third iteration on."""
    model = Recurrent().to(device)
    total = torch.zeros((), device=device)
    executions = []
    with torch.no_grad():
        for x, _ in batches(12):
            with counted() as counts:
                total += model(x.to(device), 20).square().sum()
            executions.append(counts.executions)
    assert max(executions[-4:]) == 1


def test_a_captured_step_is_not_cut(device: torch.device) -> None:
    import xla_amp

    weight = torch.ones(3, 3).to(device)

    @xla_amp.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = x @ weight * 0.25
        return x

    for _ in range(5):
        step(torch.ones(2, 3).to(device))
    assert step.replays >= 2
    assert not step.reasons


def test_a_loop_inside_a_transform(device: torch.device) -> None:
    def power(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = x * 0.5 + 0.25 * x
        return x.sum()

    x = torch.linspace(0.0, 0.1, 6).reshape(2, 3)
    for transform in (torch.func.vmap(power), torch.func.vmap(torch.func.grad(power))):
        torch.testing.assert_close(transform(x.to(device)).cpu(), transform(x), rtol=1e-3, atol=1e-4)


def test_ending_a_step_is_asynchronous(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    with counted() as counts:
        for _ in range(200):
            x = x * 0.5 + 1
    assert counts.executions > 100
    assert counts.host_syncs == counts.device_to_host == 0


def test_the_whole_size_is_bounded_without_a_loop(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "most", 60)
    x = torch.ones(70).to(device)
    with counted() as counts:
        for size in range(69, 0, -1):
            x = x[:size] + 1
    assert counts.executions >= 1
    assert x.tolist() == [70.0]


def test_repetition() -> None:
    none: set[tuple[int, ...]] = set()
    assert loops.repetition([1, 2, 3, 4], 2, none) is None
    assert loops.repetition([7, 1, 2, 3, 1, 2, 3], 2, none) == (1, 3)
    assert loops.repetition([1, 5, 5, 5, 2, 1, 5, 5, 5, 2, 1, 5, 5, 5], 2, none) == (0, 5)  # not the inner one
    assert loops.repetition([5, 5, 5, 5], 2, {(5,)}) is None
    assert loops.repetition([1, 2, 1, 2], 3, none) is None


def test_memory_that_may_not_be_reused_makes_no_other_program(device: torch.device) -> None:
    model = network(23).to(device)
    with torch.no_grad(), counted() as counts:
        for x, _ in batches(2):
            x = x.to(device)
            model(x).sum().item()  # `x` is held
        model(batches(1)[0][0].to(device)).sum().item()  # the batch is not
    assert counts.compilations == 1
    assert execute.programs()


def test_looks_read_each_operation_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step has no loop; that each look read all of it again was a tenth of the time to record GPT-2."""
    read = []
    find = loops.instruction_of
    monkeypatch.setattr(loops, "instruction_of", lambda number: read.append(number) or find(number))
    x = torch.ones(400, requires_grad=True).to(device)
    for size in range(399, 100, -1):
        x = x[:size] + 1
    assert 300 < len(read) <= trace.count
    x.sum().item()


def test_an_operation_that_was_removed_is_read_again(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    with trace.lock:
        start = trace.position()
        x = x + 1
        before = list(loops._operations.read().ids)
        trace.truncate(start)
        x = x * 2
        assert loops._operations.read().ids[-1] != before[-1]
        assert len(loops._operations.read().ids) == len(before)
        trace.truncate(start)
