"""The policies `cautious`, `default` and `lean`: chosen by name on every front, and what stays low under `lean`."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import xla_amp
from xla_amp import policy, stablehlo
from xla_amp.cli import main
from xla_amp.errors import PolicyError


class Small(nn.Module):
    """Embedding, a residual block with a norm and attention, and GPT-2's gelu, which cubes by ``pow``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.qkv, self.head = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        h = self.qkv(self.norm(x))
        x = x + F.softmax(h @ h.mT, -1) @ h
        x = x + 0.5 * x * (1 + torch.tanh(x + 0.044715 * torch.pow(x, 3.0)))
        self.stream = x.dtype
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_lean_keeps_the_stream_low_and_the_loss_in_float32(device: torch.device) -> None:
    tokens = torch.arange(12).reshape(2, 6) % 5
    exact = Small().double()
    exact(tokens).backward()
    for level, stream in (("cautious", torch.float32), ("lean", torch.bfloat16)):
        model = Small().to(device)
        with xla_amp.autocast(device, policy=level), xla_amp.explain() as report:
            loss = model(tokens.to(device))
        loss.backward()
        assert model.stream == stream
        assert loss.dtype == torch.float32
        used = {each.operation: (each.cast, each.result[0]) for each in report.records}
        wide = "float32" if level == "cautious" else "bfloat16"
        assert {used[name][1] for name in ("layer_norm", "softmax.int", "pow.Tensor_Scalar")} == {wide}
        assert used["cross_entropy_loss"][1] == "float32"
        for got, wanted in zip(model.parameters(), exact.parameters(), strict=True):
            assert got.grad is not None
            assert wanted.grad is not None
            assert got.grad.dtype == torch.float32
            torch.testing.assert_close(
                got.grad.cpu().double(), wanted.grad, rtol=0.1, atol=0.03 * float(wanted.grad.abs().max())
            )


def test_the_gradient_of_an_embedding_adds_up_in_float32() -> None:
    table = torch.zeros(2, 4, requires_grad=True)
    for place in (torch.device("cpu"), xla_amp.xla_device()):
        weight = table.detach().to(place).requires_grad_()
        with xla_amp.autocast(place, policy="lean"):
            rows = F.embedding(torch.zeros(1000, dtype=torch.long, device=place), weight)
        assert rows.dtype == torch.bfloat16
        rows.sum().backward()
        assert weight.grad is not None
        assert weight.grad[0].cpu().tolist() == [1000.0] * 4  # a running bfloat16 sum of ones stops at 256


def test_lean_in_stablehlo_and_on_the_command_line(tmp_path: pathlib.Path, capsys: Any) -> None:
    lowered = jax.jit(lambda x, w: jnp.exp(x @ w) @ w).lower(jnp.ones((8, 8)), jnp.ones((8, 8)))
    source = tmp_path / "in.mlir"
    source.write_text(lowered.as_text())
    results = {}
    for level in ("cautious", "default", "lean"):
        out = tmp_path / f"{level}.mlir"
        assert main(["convert", str(source), "-o", str(out), "--policy", level]) == 0
        results[level] = out.read_text()
        report = stablehlo.autocast(lowered, policy=level).report
        (exp,) = [each for each in report.operations if each.operation == "exponential"]
        assert (exp.after, *exp.result) == ("float32", "bfloat16" if level == "lean" else "float32")
    assert results["default"] == results["cautious"]
    assert "exponential" in results["lean"]


def test_default_is_the_devices_own(own_policy: str) -> None:
    with xla_amp.explain() as report:
        for level in (None, "default"):
            for place, name in ((torch.device("cpu"), "cpu"), (xla_amp.xla_device(), own_policy)):
                report.records.clear()
                with xla_amp.autocast(place, policy=level):
                    torch.ones(2, 2, device=place) @ torch.ones(2, 2, device=place)
                assert {each.policy for each in report.records} == {name}
    with pytest.raises(PolicyError, match="'default' is the device's own: 'tpu' on XLA:TPU"):
        policy.load("default")


def test_lean_differs_from_cautious_only_where_the_page_says() -> None:
    lean, cautious = policy.load("lean").casts(), policy.load("cautious").casts()
    assert cautious == policy.load("tpu").casts()
    changed = {name: cast for name, cast in lean.items() if cautious.get(name) != cast}
    assert set(changed.values()) == {"fp32_inside", "low"}
    assert [name for name, cast in changed.items() if cast == "low"] == ["embedding"]
