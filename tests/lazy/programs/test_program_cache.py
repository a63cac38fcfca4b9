"""Programs trace an instruction once and are bounded by bytes; what belongs to dropped ones goes with them."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax._src import pjit
from jax._src.interpreters import partial_eval

import xla_amp
from xla_amp import lowering
from xla_amp.lazy.programs import execute, program_cache
from xla_amp.testing import counts as counted

LIBRARY = torch.library.Library("traced_once", "DEF")


def executables() -> int:
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.fixture(autouse=True)
def _empty(device: torch.device) -> None:
    execute.clear_programs()


def train(device: torch.device, shapes: range) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for shape in shapes:
        optimizer.zero_grad()
        loss = model(torch.ones(shape, 4).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu().item())
    return losses


def test_traces_of_jaxs_own_functions_are_dropped(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = jax.jit(lambda x: jnp.where(x > 0, x, jnp.square(x)))
    mine(jnp.ones(3))
    train(device, range(1, 4))
    monkeypatch.setattr(program_cache, "_TRACES", 100)
    for shape in range(4, 12):
        train(device, range(shape, shape + 1))
        owners = [reference().__module__ for reference, *_ in partial_eval.trace_to_jaxpr.cache_keys() if reference()]
        assert sum(owner.startswith("jax.") for owner in owners) <= 100
        types = getattr(pjit, "_seen_qdds", {})  # of JAX 0.10.2
        assert sum(len(seen) for function, seen in types.items() if function.__module__.startswith("jax.")) <= 200
    assert __name__ in owners
    with counted() as counts, jax.no_tracing():  # what was compiled runs as before
        mine(jnp.ones(3))
        train(device, range(1, 4))
    assert counts.compilations == 0


def test_the_program_that_ran_last_stays(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_PROGRAM_MEMORY", "1")  # less than any program
    for length in (3, 4):
        for expected in (1, 0, 0):
            with counted() as counts:
                torch.ones(length).to(device).add(1).cpu()
            assert counts.compilations == expected
            assert len(execute.programs()) == xla_amp.metrics()["programs_kept"] == 1
    report = xla_amp.metrics.report()
    assert "executables kept now" in report
    assert "executables dropped to stay within" in report


def test_the_least_recently_run_goes_first(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(length: int) -> int:
        with counted() as counts:
            torch.ones(length).to(device).mul(3).cpu()
        return counts.compilations

    assert [run(1), run(2), run(1)] == [1, 1, 0]
    room = sum(program.size for program in execute.programs())
    monkeypatch.setenv("XLA_AMP_PROGRAM_MEMORY", str(room + 1000))
    assert [run(3), run(1), run(3), run(2)] == [1, 0, 0, 1]


def test_a_captured_step_gives_up_its_program(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(3).to(device)

    @xla_amp.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        weight.mul_(2)
        return (x * weight).sum()

    x = torch.ones(3).to(device)
    assert [step(x).item() for _ in range(4)] == [6, 12, 24, 48]
    assert step.replays >= 1
    before = executables()
    monkeypatch.setenv("XLA_AMP_PROGRAM_MEMORY", "1")
    torch.ones(5).to(device).sub(1).cpu()
    assert executables() <= before  # one came, the step's went
    xla_amp.metrics.reset()
    assert [step(x).item() for _ in range(3)] == [96, 192, 384]
    assert "dropped to stay within XLA_AMP_PROGRAM_MEMORY" in xla_amp.metrics.report()
    assert weight.tolist() == [128, 128, 128]


def test_host_programs_count_too(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_PROGRAM_MEMORY", "1")
    for length in (2, 3, 4):
        with counted() as counts:
            assert (torch.arange(length).to(device) + 1).sum().item() == length * (length + 1) // 2
        assert counts.host_values == 1
        assert xla_amp.metrics()["programs_kept"] == 1


def test_a_warning_that_is_an_error_leaves_values_alone(device: torch.device) -> None:
    value = torch.zeros(()).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", xla_amp.errors.RecompileWarning)
        raised = 0
        for length in range(1, 10):
            value = value + torch.ones(length).to(device).sum()
            try:
                xla_amp.sync()
            except xla_amp.errors.RecompileWarning:
                raised += 1
    assert raised == 1
    assert value.item() == 45


def test_each_distinct_instruction_is_traced_once(device: torch.device) -> None:
    LIBRARY.define("doubled(Tensor x) -> Tensor")
    LIBRARY.impl("doubled", torch.empty_like, "Meta")
    traced: list[tuple[int, ...]] = []

    @lowering.register("traced_once::doubled")
    def doubled(x: Any) -> Any:
        traced.append(x.shape)
        return x * 2

    x, y = torch.ones(2, 3).to(device), torch.ones(5).to(device)
    for _ in range(6):
        x, y = torch.ops.traced_once.doubled(x).tanh(), torch.ops.traced_once.doubled(y)
    assert y.tolist() == [64] * 5
    assert x.isfinite().all()
    assert sorted(traced) == [(2, 3), (5,)]
