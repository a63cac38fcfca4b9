"""Whole training steps on the lazy device: same numbers as torch, one executable, no host sync.

Skips are in tests/pytorch/optim.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
import torch
from harness import COMPILED, jax_events
from networks import build, loss_of, losses

import xla_amp
from xla_amp.lazy.programs import execute
from xla_amp.testing import counts as counted

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-4}),
    "adam": ("Adam", {"lr": 1e-3}),
    "adamw": ("AdamW", {"lr": 1e-3, "weight_decay": 0.01}),
}


def optimizer_of(name: str, model: torch.nn.Module, library: Any = xla_amp.syncfree) -> torch.optim.Optimizer:
    class_name, options = OPTIMIZERS[name]
    return getattr(library, class_name)(model.parameters(), **options)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def fp32_losses(network: str, optimizer_name: str, device: Any, library: Any, steps: int = 20) -> list[float]:
    model, batches = build(network, device)
    optimizer = optimizer_of(optimizer_name, model, library)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
        xla_amp.sync()
    return losses(history)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("network", ["convnet", "transformer"])
def test_twenty_fp32_steps_match_torch_on_the_cpu(network: str, optimizer: str) -> None:
    ours = fp32_losses(network, optimizer, xla_amp.xla_device(), xla_amp.syncfree)
    reference = fp32_losses(network, optimizer, "cpu", torch.optim)
    assert reference[-1] < reference[0]
    assert ours == pytest.approx(reference, rel=1e-5)


# ---- one executable, no host sync ------------------------------------------------------------------------------------


class Trainer:
    """An AMP loop with a schedule that passes through 0, 0.5 and 1 times the learning rate."""

    def __init__(self, network: str, optimizer: str, dtype: torch.dtype) -> None:
        self.device = xla_amp.xla_device()
        self.model, self.batches = build(network, self.device)
        self.optimizer = optimizer_of(optimizer, self.model)
        factors = (1.0, 0.5, 0.0, 0.25, 0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: factors[step % 5])
        self.scaler = xla_amp.GradScaler(self.device.type, init_scale=2.0**10, enabled=dtype is torch.float16)
        self.dtype = dtype
        self.history: list[torch.Tensor] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        with xla_amp.autocast(self.device, dtype=self.dtype):
            loss = loss_of(self.model, self.batches[len(self.history) % len(self.batches)])
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.history.append(loss.detach())


LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@LOW
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_steady_amp_step_is_one_executable_without_host_sync(optimizer: str, dtype: torch.dtype) -> None:
    trainer = Trainer("transformer" if optimizer == "adamw" else "convnet", optimizer, dtype)
    for _ in range(2):
        trainer.step()
        xla_amp.sync()
    with jax_events() as events, counted() as counts, jax.transfer_guard("disallow"):
        for _ in range(6):
            trainer.step()
            xla_amp.sync()
    assert counts.executions == 6
    expected_to_change = ("executions", "operations", "host_values", "programs_kept", "program_bytes")
    assert {name: count for name, count in counts().items() if name not in expected_to_change} == {
        "programs_dropped": 0,
        "programs_loaded": 0,
        "compilations": 0,
        "host_syncs": 0,
        "device_to_host": 0,
        "host_to_device": 0,
        "fallbacks": 0,
    }
    assert COMPILED not in events
    values = losses(trainer.history)
    assert all(value == value for value in values)


def test_the_counters_see_a_host_sync_and_a_compilation() -> None:
    trainer = Trainer("mlp", "sgd", torch.bfloat16)
    trainer.step()
    with jax_events() as events, counted() as counts:
        trainer.history[-1].item()
    assert (counts.host_syncs, counts.compilations) == (1, 1)
    assert COMPILED in events


def test_a_loop_that_never_syncs_runs_one_executable_per_step() -> None:
    trainer = Trainer("mlp", "adamw", torch.float16)
    for _ in range(4):
        trainer.step()
    with counted() as counts:
        for _ in range(10):
            trainer.step()
    assert (counts.executions, counts.compilations, counts.host_syncs) == (10, 0, 0)


# ---- dtypes of the compiled program ----------------------------------------------------------------------------------


def contraction_operands(hlo: str) -> set[tuple[str, ...]]:
    """(left, right) element types of every dot of an optimized HLO module."""
    types = dict(re.findall(r"%?([\w.-]+) = (\w+)\[", hlo))
    dots = re.findall(r" dot\(([^)]*)\)", hlo)
    return {tuple(types[operand.strip().lstrip("%")] for operand in dot.split(",")) for dot in dots}


@pytest.mark.parametrize("network", ["mlp", "transformer"])
def test_every_contraction_of_a_bf16_step_has_bf16_operands(network: str) -> None:
    trainer = Trainer(network, "sgd", torch.bfloat16)
    for _ in range(3):
        trainer.step()
        xla_amp.sync()
    assert contraction_operands(execute.programs()[-1].optimized_hlo()) == {("bf16", "bf16")}
