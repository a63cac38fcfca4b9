"""What the counters claim, shown by JAX itself: its compile log, its monitoring events, its transfer guards."""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch
from harness import COMPILED, TRACED, jax_events
from torch import nn

from xla_amp import lazy as engine
from xla_amp.testing import counts as counted


@pytest.fixture(scope="module", params=["adam", "adamw, capturable"])
def step(request: pytest.FixtureRequest) -> Callable[[float], torch.Tensor]:
    """A training step with dropout, clipping and a learning rate; its input is on the device already."""
    device = engine.device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 4)).to(device)
    optimizer = {
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


def test_a_steady_step_builds_nothing_and_moves_nothing(step: Callable[[float], torch.Tensor]) -> None:
    """On accelerators JAX's guard finds a read; on the CPU the engine's own counters do."""
    with jax.transfer_guard("disallow"), jax_events() as events, counted() as counts:
        for rate in RATES:
            step(rate)
            engine.sync()
    assert [event for event in events if event in (COMPILED, TRACED)] == []
    assert (counts.executions, counts.compilations, counts.fallbacks) == (len(RATES), 0, 0)
    assert (counts.host_syncs, counts.device_to_host, counts.host_to_device) == (0, 0, 0)
    assert step(0.1).isfinite().item()


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


def test_the_transfer_guard_can_fail() -> None:
    """The twin: an implicit upload under the same guard is refused."""
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed host-to-device"):
        jnp.ones(3) + jnp.float32(1)
