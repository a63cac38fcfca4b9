"""Type checkers on a user's program: real signatures, misspelt names and arguments rejected, decorated types kept."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
import xla_amp
import xla_amp.checkpoint
import xla_amp.jax
import xla_amp.torch_xla as xr
import xla_amp.xla_model as xm
from xla_amp import GradScaler, autocast, syncfree, xla_device
from xla_amp.metrics import report
from xla_amp.syncfree import AdamW


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


reveal_type(xla_device())  # shown: device
reveal_type(xla_amp.metrics())  # shown: dict[str, int]
reveal_type(GradScaler().get_scale())  # shown: float
reveal_type(GradScaler().scale(torch.ones(1)))  # shown: Tensor
reveal_type(AdamW([torch.ones(1)]).step(lambda: 1.0))  # shown: float
reveal_type(report())  # shown: str
reveal_type(xm.get_ordinal())  # shown: int
reveal_type(xr.compile(loss))  # shown: (weight: float, x: int) -> str
reveal_type(xla_amp.checkpoint.save_async({}, "x").wait())  # shown: None
reveal_type(forward)  # shown: (x: Tensor, width: int) -> Tensor
reveal_type(step(torch.ones(1), 2))  # shown: Tensor
reveal_type(xla_amp.jax.autocast(loss)(1.0, x=2))  # shown: str
reveal_type(xla_amp.jax.autocast(loss).report(1.0, 2).low)  # shown: tuple[Line, ...]
reveal_type(xla_amp.jax.value_and_grad(loss)(xla_amp.jax.LossScale.dynamic(), 1.0, x=2).value)  # shown: str
xla_amp.autocastt("cpu")  # refused
xla_amp.jax.autocats(loss)  # refused
xla_amp.stablehlo.autocats  # refused
xm.xla_devise()  # refused
xla_amp.checkpoint.sve  # refused
autocast("cpu", polcy=3)  # refused
syncfree.AdamW([torch.ones(1)], lrr=1e-3)  # refused
forward(torch.ones(1), widht=2)  # refused
strict_step(torch.ones(1))  # refused
xla_amp.jax.autocast(loss)(1.0, "x")  # refused
xla_amp.jax.autocast(loss).report(1.0, "x")  # refused
xla_amp.jax.autocast(loss, polcy=3)  # refused
xla_amp.jax.value_and_grad(loss)(1.0, 2)  # refused
xla_amp.compile(step, stict=True)  # refused
"""
SHOWN = {n: line.partition("# shown: ")[2] for n, line in enumerate(PROGRAM.splitlines(), 1) if "# shown: " in line}
REFUSED = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if "# refused" in line}

MYPY = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--show-error-codes"]
PYRIGHT = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]


def check(command: list[str], folder: Path, program: str) -> tuple[dict[int, str], set[int]]:
    """The types that a checker reveals and the lines that it refuses, in a user's own folder."""
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [*command, "program.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=280
    )
    shown, refused = {}, set()
    for line in done.stdout.splitlines():
        found = re.match(r"\s*\S*program\.py:(\d+):(?:\d+)?[ :-]*(note|information|error|warning):? (.*)", line)
        if found is None:
            continue
        number, kind, text = int(found[1]), found[2], found[3]
        if kind == "error":
            refused.add(number)
        elif 'evealed type is "' in text or 'Type of "' in text:
            shown[number] = re.split(r'(?:Revealed type is|Type of ".*" is) "', text)[1].rstrip('"')
    assert shown, done.stdout + done.stderr
    return shown, refused


def plain(text: str) -> str:
    """A type without the checkers' own spelling: no ``def``, no full module names, parameters in parentheses."""
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text.removeprefix("def "))
    return re.sub(r"\[\[(.*)\], ", r"[(\1), ", text)


@pytest.mark.full  # test_public_names.py compares the names
@pytest.mark.parametrize("command", [MYPY, PYRIGHT], ids=["mypy", "pyright"])
def test_a_users_program(command, tmp_path):
    shown, refused = check(command, tmp_path, PROGRAM)
    assert {number: plain(text) for number, text in shown.items()} == SHOWN
    assert refused == REFUSED
