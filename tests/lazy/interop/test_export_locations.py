"""Modules and lines of the user's program in exported programs and in torch modules called from JAX."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import xla_amp
import xla_amp.jax
from xla_amp import policy, stablehlo
from xla_amp.lazy.programs import execute
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.converted import as_program
from xla_amp.stablehlo.scope_paths import own_path

DEVICE = xla_amp.xla_device()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.fc = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(self.norm(x))  # the line


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).softmax(-1)


LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# the line"))
PRODUCTS = ["blocks.0.fc", "blocks.1.fc", "head"]


@pytest.fixture(scope="module")
def model() -> Any:
    return Model().to(DEVICE)


@pytest.fixture(scope="module")
def exported(model: Any) -> Any:
    return xla_amp.export(model, torch.ones(3, 6, device=DEVICE))


KEPT: list[Any] = []
"""Modules of operations that tests read: an operation does not keep its module alive."""


def products(program: Any) -> list[Any]:
    KEPT.append(as_program(program).module)
    return [op for op in ir.operations(KEPT[-1].operation) if op.name == "stablehlo.dot_general"]


def test_locations_name_modules_and_lines(exported: Any) -> None:
    found = products(exported)
    assert [own_path(each) for each in found] == PRODUCTS
    first = str(found[0].location)
    assert f'"blocks/0/fc/dot_general"(callsite("addmm"("{__file__}":{LINE}:' in first
    assert "contraction.py" in first.partition(" at ")[2]


def test_a_rule_reaches_the_exported_module(exported: Any) -> None:
    program = as_program(exported.serialize())
    report = stablehlo.autocast(program, rules={"module:*.head": "fp32"}, strict=True).report
    assert [(each.module, each.after) for each in report.operations if each.operation == "dot_general"] == [
        ("blocks.0.fc", "bfloat16"),
        ("blocks.1.fc", "bfloat16"),
        ("head", "float32"),
    ]


def test_a_training_step_names_the_backward_pass_and_runs_as_one_executable(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with xla_amp.autocast(DEVICE):
            loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(3, 6, device=DEVICE)
    step(x)
    names = [str(each.location).split('"')[1] for each in products(xla_amp.export(step, x))]
    assert [name for name in names if "transpose" not in name] == [
        f"{each.replace('.', '/')}/dot_general" for each in PRODUCTS
    ]
    assert {re.sub(r"transpose\(jvp\((\w+)\)\)", r"\1", name) for name in names} == {
        f"{each.replace('.', '/')}/dot_general" for each in PRODUCTS
    }


def test_lines_are_no_part_of_the_programs_key(model: Any) -> None:
    x = torch.ones(3, 6, device=DEVICE)
    with torch.no_grad():
        for _ in range(2):
            model(x).sum().item()
        before = xla_amp.metrics()["compilations"]
        model(x).sum().item()  # another line
        assert xla_amp.metrics()["compilations"] == before
    text = str(execute.programs()[-1].lower().compiler_ir().operation.get_asm(enable_debug_info=True))
    assert f'"{__file__}":{LINE}' in text or f'test_export_locations.py":{LINE}' in text


def test_a_torch_module_called_from_jax_names_its_modules() -> None:
    params, function = xla_amp.jax.functional(Model())

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(function(params, x))

    x = jnp.ones((6, 6))
    rules: Any = {"module:*.head": "fp32"}
    with policy.override(rules), xla_amp.explain() as report:
        xla_amp.jax.autocast(jax.grad(loss), strict=True)(params, x)
    found = [(each.module, each.used[0]) for each in report.records if each.operation == "matmul"]
    assert {module for module, _ in found} == set(PRODUCTS)
    assert all((used == "float32") == (module == "head") for module, used in found)
    assert any(each.location == f"{__file__}:{LINE}" for each in report.records)
    lowered = jax.jit(jax.grad(loss)).lower(params, x)
    assert stablehlo.autocast(lowered, rules=rules, strict=True).report.operations
