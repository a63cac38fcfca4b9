"""Type checkers on a user's program: real signatures, misspelt names and arguments rejected, decorated types kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
# pyright: reportUnnecessaryTypeIgnoreComment=true
from typing import assert_type

import torch
import xla_amp
import xla_amp.checkpoint
import xla_amp.jax
import xla_amp.torch_xla as xr
import xla_amp.xla_model as xm
from xla_amp import GradScaler, autocast, syncfree, xla_device
from xla_amp.metrics import report
from xla_amp.syncfree import AdamW
from xla_amp.pages.precision_report import Line


@autocast("cpu")
def forward(x: torch.Tensor, width: int) -> torch.Tensor:
    return x * width


@xla_amp.compile
def step(x: torch.Tensor, width: int) -> torch.Tensor:
    return x * width


@xla_amp.compile(strict=True)
def strict_step(x: torch.Tensor, width: int) -> torch.Tensor:
    return x * width


def loss(weight: float, x: int) -> str:
    return ""


assert_type(xla_device(), torch.device)
assert_type(xla_amp.metrics(), dict[str, int])
assert_type(GradScaler().get_scale(), float)
assert_type(GradScaler().scale(torch.ones(1)), torch.Tensor)
assert_type(AdamW([torch.ones(1)]).step(lambda: 1.0), float)
assert_type(report(), str)
assert_type(xm.get_ordinal(), int)
assert_type(xr.compile(loss)(1.0, x=2), str)
assert_type(xla_amp.checkpoint.save_async({}, "x").result(), None)
assert_type(forward(torch.ones(1), width=2), torch.Tensor)
assert_type(step(torch.ones(1), 2), torch.Tensor)
assert_type(xla_amp.jax.autocast(loss)(1.0, x=2), str)
assert_type(xla_amp.jax.autocast(loss).report(1.0, 2).low, tuple[Line, ...])
assert_type(xla_amp.jax.value_and_grad(loss)(xla_amp.jax.LossScale.dynamic(), 1.0, x=2).value, str)
xla_amp.autocastt("cpu")  # type: ignore
xla_amp.jax.autocats(loss)  # type: ignore
xla_amp.stablehlo.autocats  # type: ignore
xm.xla_devise()  # type: ignore
xla_amp.checkpoint.sve  # type: ignore
autocast("cpu", polcy=3)  # type: ignore
syncfree.AdamW([torch.ones(1)], lrr=1e-3)  # type: ignore
forward(torch.ones(1), widht=2)  # type: ignore
strict_step(torch.ones(1))  # type: ignore
xr.compile(loss)(1.0, "x")  # type: ignore
xla_amp.jax.autocast(loss)(1.0, "x")  # type: ignore
xla_amp.jax.autocast(loss).report(1.0, "x")  # type: ignore
xla_amp.jax.autocast(loss, polcy=3)  # type: ignore
xla_amp.jax.value_and_grad(loss)(1.0, 2)  # type: ignore
xla_amp.compile(step, stict=True)  # type: ignore
"""
"""A comment that ignores nothing is an error, too."""


@pytest.mark.full  # test_public_names.py compares the names
@pytest.mark.parametrize("checker", [["mypy", "--strict"], ["pyright", "--warnings", "--pythonpath", sys.executable]])
def test_a_users_program(checker, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", *checker, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
