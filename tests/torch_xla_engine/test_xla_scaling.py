"""`GradScaler` and `syncfree` on torch_xla: where its native operations are not right, and one program per step.

What holds on every device is in tests/pytorch/optim (test_xla_shared_files.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as counters
from source_tree import ROOT
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree
from xla_amp.engines import base

SHAPES = [(5, 3), (4,), ()]
STEPS = 5


def parameters(device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params:
        gradient = torch.randn(parameter.shape, generator=generator) * factor
        parameter.grad = gradient.to(parameter.dtype).to(parameter.device)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adagrad", {"fused": True, "lr_decay": 0.1, "weight_decay": 0.1}),
        ("Adagrad", {"fused": True, "maximize": True}),
        ("Adam", {"fused": True, "amsgrad": True}),
        ("AdamW", {"fused": True}),
        ("SGD", {"fused": True, "momentum": 0.9, "nesterov": True}),
        ("Adadelta", {}),
    ],
    ids=str,
)
def test_torchs_own_optimizers_step_on_the_device(name, options):
    """torch refuses `fused` for XLA, and asks where Adadelta's count may be without naming XLA: ours enter it."""
    ours, reference = parameters("xla", torch.float32), parameters("cpu", torch.float64)
    optimizer = getattr(torch.optim, name)(ours, lr=0.1, **options)
    plain = getattr(torch.optim, name)(reference, lr=0.1, **{k: v for k, v in options.items() if k != "fused"})
    scaler = GradScaler("xla", init_scale=4.0, growth_interval=100)
    scaler.scale(torch.zeros(()).to("xla"))
    torch_xla.sync(wait=True)
    before = base.metrics()["device_to_host"]
    for step in range(STEPS):
        set_gradients(ours, step, factor=float("nan"))
        scaler.step(optimizer)
        scaler.update(4.0)
        set_gradients(ours, step, factor=4.0)
        set_gradients(reference, step)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        torch_xla.sync()
    assert base.metrics()["device_to_host"] == before
    for mine, right in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.detach().cpu().double(), right.detach(), rtol=1e-5, atol=1e-6)


def test_learning_rates_compile_nothing():
    """0 and 1 included, which torch_xla compiles into its programs, and 0.1, which is also 1 - beta1."""
    ours = parameters("xla", torch.float32)
    optimizer = syncfree.AdamW(ours, lr=0.1)
    compiled = []
    for step, lr in enumerate([0.1, 0.1, 0.1, 0.05, 1.0, 0.0, 0.3, 1.0]):
        optimizer.param_groups[0]["lr"] = lr
        set_gradients(ours, step)
        torch_xla.sync()
        before = base.metrics()["compilations"]
        optimizer.step(found_inf=torch.zeros(()).to("xla"))
        torch_xla.sync()
        compiled.append(base.metrics()["compilations"] - before)
    assert compiled == [1, 1, 0, 0, 0, 0, 0, 0]  # the first step makes the state


def test_gradients_of_sums():
    """Their elements share memory, and torch_xla 2.9 adds where it should overwrite."""
    weight = nn.Parameter(torch.ones(2).to("xla"))
    scaler = GradScaler("xla", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
    assert weight.grad.tolist() == [1.0, 1.0]
    weight.grad.mul_(3)
    assert weight.grad.tolist() == [3.0, 3.0]
    (other := nn.Parameter(torch.ones(2).to("xla"))).sum().backward()
    other.grad.mul_(3)
    assert other.grad.tolist() != [3.0, 3.0]  # torch_xla's own: [5, 5]; when this fails `make_own` is not needed


def train(scaler: torch.amp.GradScaler, make, steps: int = 6) -> dict[str, float]:
    """Executions and transfers per step by torch_xla's own counters, after two steps of warming up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to("xla")
    optimizer = make(model.parameters())
    batches = [(torch.randn(4, 8).to("xla"), torch.randn(4, 1).to("xla")) for _ in range(steps + 2)]
    torch_xla.sync(wait=True)
    for index, (x, y) in enumerate(batches):
        if index == 2:
            torch_xla.sync(wait=True)
            before = counts()
        optimizer.zero_grad()
        with xla_amp.autocast("xla", policy="gpu"):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch_xla.sync(wait=True)
    after = counts()
    return {name: (after[name] - before[name]) / steps for name in after}


def counts() -> dict[str, int]:
    transfers = counters.metric_data("TransferFromDeviceTime")
    return {
        "executions": counters.counter_value("ExecuteComputation") or 0,
        "transfers": 0 if transfers is None else transfers[0],
        "ours": base.metrics()["executions"],
    }


ONE = {"executions": 1, "transfers": 0, "ours": 1}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: syncfree.SGD(p, lr=0.1, momentum=0.9),
        lambda p: syncfree.AdamW(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: syncfree.wrap(torch.optim.RMSprop(p, lr=0.01)),
    ],
    ids=["syncfree.SGD", "syncfree.AdamW", "SGD", "Adam", "wrapped RMSprop"],
)
def test_one_program_and_no_transfer_per_step(make):
    assert train(GradScaler("xla"), make) == ONE


def test_what_the_stock_scaler_costs():
    stock = train(torch.amp.GradScaler("xla"), lambda p: torch.optim.SGD(p, lr=0.1))
    assert stock == {"executions": 2, "transfers": 1, "ours": 2}


def test_a_loop_that_never_syncs_runs_a_program_per_step():
    parameter = nn.Parameter(torch.ones(3).to("xla"))
    optimizer = syncfree.SGD([parameter], lr=0.1)
    torch_xla.sync(wait=True)
    before = base.metrics()["executions"]
    for _ in range(4):
        optimizer.zero_grad()
        with xla_amp.autocast("xla"):
            loss = (parameter * 2).sum()
        loss.backward()
        optimizer.step()
    torch_xla.sync()
    with xla_amp.autocast("xla"):  # the step has been ended: nothing more to run
        pass
    assert base.metrics()["executions"] - before == 4


def test_the_example():
    environment = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    flags = ["--json", "--epochs=2", "--precision=fp16", "--policy=gpu", "--optimizer=adam"]
    command = [sys.executable, ROOT / "examples" / "mnist.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    assert "xla:0 (CPU)" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["executions_per_step"], found["host_syncs_per_step"]) == (1, 0)
    assert found["accuracy"] > 0.8
