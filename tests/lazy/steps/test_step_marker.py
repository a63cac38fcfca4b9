"""Loops that never call `sync()`: one executable per optimizer step, nothing recompiled, memory that does not grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import calls
import jax
import pytest
import torch
from calls import COMPILED, TRACED, jax_events
from torch import nn

import xla_amp
from xla_amp import lazy as engine
from xla_amp.lazy.graph.trace import trace
from xla_amp.testing import counts as counted


def network(width: int = 9) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.GELU(), nn.Dropout(0.3), nn.Linear(width, 1)).to("jax")


def batch() -> torch.Tensor:
    return torch.ones(4, 5)


LOOPS: dict[str, tuple[Callable[[], Callable[[], Any]], float]] = {}
"""Name -> (maker of a loop body, executables per run of the body)."""


def loop(executables: float) -> Callable[[Any], Any]:
    def decorate(make: Callable[[], Callable[[], Any]]) -> Any:
        LOOPS[make.__name__] = make, executables
        return make

    return decorate


Body = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], Any]


def training(
    executables: float, kind: type[torch.optim.Optimizer], where: str = "cpu", **options: Any
) -> Callable[[Body], Body]:
    """A loop whose body gets a network, its optimizer and a batch that is `where`."""

    def decorate(body: Body) -> Body:
        def make() -> Callable[[], Any]:
            model, x = network(), batch().to(where)
            optimizer = kind(model.parameters(), lr=0.01, **options)
            return lambda: body(model, optimizer, x)

        LOOPS[body.__name__] = make, executables
        return body

    return decorate


def step(model: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x.to("jax")).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@training(1, torch.optim.Adam)
def zero_grad_before_with_another_rate(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9
    step(model, optimizer, x)


@training(1, torch.optim.AdamW)
def loss_read_every_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    return step(model, optimizer, x).item()


@training(2, torch.optim.AdamW)
def loss_read_before_the_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x.to("jax")).square().mean()
    loss.backward()
    value = loss.item()
    optimizer.step()
    return value


@training(1, torch.optim.SGD)
def gradients_accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for _ in range(3):
        model(x.to("jax")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@training(1, torch.optim.SGD, where="jax")
def data_on_the_device_already(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(x).square().mean().backward()
    optimizer.step()


@training(1, torch.optim.SGD, where="jax")
def climbs_before_the_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for climbs in (True, False):  # sharpness-aware minimization
        with xla_amp.autocast(x.device):
            loss = nn.functional.layer_norm(model(x), (1,)).softmax(0).square().mean().log()
        loss.backward()
        for parameter in model.parameters() if climbs else ():
            parameter.data += 0.05 * parameter.grad
    optimizer.step()
    optimizer.zero_grad()


@loop(1)
def no_module_and_no_upload() -> Callable[[], Any]:
    weight, x = nn.Parameter(torch.ones(5, 2).to("jax")), batch().to("jax")
    optimizer = torch.optim.SGD([weight], lr=0.01)
    return lambda: step(lambda x: x @ weight, optimizer, x)


@loop(1)
def a_teacher_without_gradients_is_part_of_the_step() -> Callable[[], Any]:
    student, teacher, x = network(), network(25), batch().to("jax")
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)

    def body() -> None:
        loss = student(x).square().mean()
        for _ in range(12):
            with torch.no_grad():
                goal = teacher(x).mean() + student(x).mean()
            loss = loss + goal
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return body


@loop(2)
def two_optimizers_in_turn() -> Callable[[], Any]:
    one, two, x = network(), network(7), batch()
    first = torch.optim.SGD(one.parameters(), lr=0.01)
    second = torch.optim.Adam(two.parameters(), lr=0.01)
    return lambda: (step(one, first, x), step(two, second, x))


@loop(1)
def clipped_and_averaged() -> Callable[[], Any]:
    model, x = network(), batch()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)

    def body() -> None:
        model(x.to("jax")).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(model)

    return body


@pytest.mark.parametrize("name", LOOPS)
def test_a_steady_step_builds_nothing_and_moves_nothing(device: torch.device, name: str) -> None:
    """As our counters and JAX's events tell; on accelerators its guard finds a read, too."""
    make, expected = LOOPS[name]
    body, reads = make(), 10 * name.startswith("loss_read")
    for _ in range(4):
        body()
    with jax.transfer_guard("allow" if reads else "disallow"), jax_events() as events, counted() as counts:
        for _ in range(10):
            body()
    assert {COMPILED, TRACED}.isdisjoint(events)
    assert (counts.executions, counts.compilations, counts.fallbacks) == (10 * expected, 0, 0)
    assert (counts.host_syncs, counts.device_to_host) == (reads, reads)
    assert name != "data_on_the_device_already" or counts.host_to_device == 0
    assert trace.count < 2000


@pytest.mark.parametrize("where", ["cpu", "jax"])
def test_an_integer_that_steps_write_on_the_device_is_waited_for(device: torch.device, where: str) -> None:
    model, x = network(), batch().to(device)
    optimizer, pointer = torch.optim.SGD(model.parameters(), lr=0.01), torch.zeros(1, dtype=torch.long).to(where)
    for step in range(12):
        if step == 4:
            engine.sync(wait=True)
            counts = engine.metrics()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        pointer[0] = (int(pointer) + 16) % 128
    assert engine.metrics()["host_syncs"] - counts["host_syncs"] == (8 if where == "jax" else 0)
    assert int(pointer) == 12 * 16 % 128


@pytest.mark.parametrize("checks", [True, False])
def test_checks_of_distributions_wait(device: torch.device, checks: bool) -> None:
    mean, one = torch.zeros(3).to(device).requires_grad_(), torch.ones(3).to(device)
    with counted() as counts:
        made = torch.distributions.Normal(mean, one.abs(), validate_args=checks)
        made.log_prob(one.exp()).mean().backward()
    assert counts.host_syncs == 3 * checks


def test_forward_passes_with_a_graph_are_not_cut(device: torch.device) -> None:
    """The twin of the table: the boundary is the optimizer's; these may be parts of one gradient."""
    model, x = network(), batch()
    with counted() as counts:
        for _ in range(5):
            model(x.to(device)).mean()
    assert counts.executions == 0


def test_other_devices_optimizers_are_no_boundary(device: torch.device) -> None:
    lazy, cpu = network(), nn.Linear(5, 1)
    optimizer = torch.optim.SGD(cpu.parameters(), lr=0.1)
    kept = lazy(batch().to(device))
    engine.sync()
    with counted() as counts:
        for _ in range(3):
            kept = kept + 1
            cpu(batch()).sum().backward()
            optimizer.step()
    assert counts.executions == 0


# ---- what a step costs -----------------------------------------------------------------------------------------------


def test_python_calls_of_a_step() -> None:
    """Calls of a later step, whose program is known: a layer under autocast, and the end of the step."""
    device = xla_amp.xla_device()
    first, second, x = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)
    found: dict[str, int] = {}

    def step() -> None:
        with xla_amp.autocast("xla", torch.bfloat16):
            hidden = nn.functional.linear(x, first.weight, first.bias)
            outputs: list[torch.Tensor] = []
            call = lambda: outputs.append(nn.functional.linear(hidden, second.weight, second.bias))  # noqa: E731
            found["linear"] = len(calls.of(call))
        outputs[0].float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found["sync"] = len(calls.of(xla_amp.sync))

    for _ in range(3):
        step()
    assert found["linear"] <= 30
    assert found["sync"] <= 48
