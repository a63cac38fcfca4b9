"""What the counters claim, shown by JAX itself: its compile log, its monitoring events, its transfer guards."""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch
from harness import COMPILED, TRACED, array_behind, jax_events
from torch import nn

from xla_amp import lazy as engine
from xla_amp.lazy.tensors import transfer
from xla_amp.testing import counts as counted


@pytest.fixture(scope="module", params=["sgd", "adam", "adamw, capturable"])
def step(request: pytest.FixtureRequest) -> Callable[[float], torch.Tensor]:
    """A training step with dropout, clipping and a learning rate; its input is on the device already."""
    device = engine.device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 4)).to(device)
    optimizer = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.1),
        "adamw, capturable": lambda: torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True),
    }[request.param]()
    x, y = torch.randn(8, 6).to(device), torch.arange(8).remainder(4).to(device)

    def run(rate: float) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    for rate in (0.1, 0.2, 0.3):
        run(rate)
    engine.sync()
    return run


RATES = (0.1, 0.5, 1.0, 0.0, 0.25)


def test_a_steady_step_builds_nothing(step: Callable[[float], torch.Tensor]) -> None:
    with jax_events() as events, counted() as counts:
        for rate in RATES:
            step(rate)
            engine.sync()
    assert [event for event in events if event in (COMPILED, TRACED)] == []
    assert (counts.executions, counts.compilations) == (len(RATES), 0)


def test_a_new_step_is_seen_to_be_built_once(device: torch.device) -> None:
    """The twin: JAX reports one compilation, and its log names one of our functions."""
    x = torch.ones(13).to(device)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles(), jax_events() as events, counted() as counts:
            kept = (x * 3 - 1).exp().sum()
            engine.sync()
    finally:
        logger.removeHandler(handler)
    assert events.count(COMPILED) == 1
    assert (counts.executions, counts.compilations) == (1, 1)
    messages = [r.getMessage() for r in records]
    assert len({m for m in messages if "Finished XLA compilation of" in m}) == 1, messages
    assert any("lazy_step" in m for m in messages)
    assert kept.item() == pytest.approx(13 * 2.718281828**2, rel=1e-6)


def test_a_steady_step_reads_nothing_back(step: Callable[[float], torch.Tensor]) -> None:
    """On accelerators JAX's guard sees to it; on the CPU the engine's own counters do, and the last test here."""
    with jax.transfer_guard_device_to_host("disallow"), counted() as counts:
        losses = []
        for rate in RATES:
            losses.append(step(rate))
            engine.sync()
    assert (counts.host_syncs, counts.device_to_host, counts.fallbacks) == (0, 0, 0)
    assert all(torch.isfinite(torch.stack(losses)).tolist())


def test_a_steady_step_makes_no_transfer_that_nobody_asked_for(step: Callable[[float], torch.Tensor]) -> None:
    with jax.transfer_guard("disallow"), counted() as counts:
        for rate in RATES:
            step(rate)
            engine.sync()
    assert (counts.host_to_device, counts.device_to_host) == (0, 0)


def test_the_transfer_guard_can_fail() -> None:
    """The twin: an implicit upload under the same guard is refused."""
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed host-to-device"):
        jnp.ones(3) + jnp.float32(1)


@jax.jit
def _slow(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 400, lambda _, y: jnp.tanh(y @ y), x)


@pytest.mark.full
def test_a_step_does_not_wait_for_its_input(device: torch.device) -> None:
    """Steps are dispatched while the input of the first is still being computed.

    The proof that also holds on the CPU, where the guard for transfers to the host does not apply.
    """
    start = jnp.ones((600, 600))
    _slow.lower(start).compile()
    weight = nn.Parameter(torch.full((600, 2), 1e-3).to(device))
    optimizer = torch.optim.SGD([weight], lr=1e-7, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x @ weight).square().mean()
        loss.backward()
        optimizer.step()
        engine.sync()
        return loss.detach()

    for _ in range(3):
        step(torch.ones(600, 600).to(device))
    x = transfer.wrap(_slow(start))
    losses = [step(x) for _ in range(4)]
    assert [array_behind(loss).is_ready() for loss in losses] == [False] * 4
    assert losses[-1].item() < losses[0].item()
    assert [array_behind(loss).is_ready() for loss in losses] == [True] * 4  # the twin: reading waits
