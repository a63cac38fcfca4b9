"""A run that is interrupted after any step and resumed from a checkpoint goes on bitwise as if it had not been."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree

STEPS = 8
BAD = (2, 5)
OPTIMIZERS = {
    "syncfree.AdamW": lambda p: syncfree.AdamW(p, lr=0.01),
    "syncfree.SGD": lambda p: syncfree.SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
    "wrapped RMSprop": lambda p: syncfree.wrap(torch.optim.RMSprop(p, lr=0.01, momentum=0.5)),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


class Run:
    def __init__(self, device, make):
        torch.manual_seed(3)
        self.device = device
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).to(device)
        self.optimizer = make(self.model.parameters())
        self.scaler = GradScaler(device, init_scale=64.0, growth_interval=2)

    def step(self, number, x):
        self.optimizer.zero_grad()
        noisy = x + torch.rand(4, 6, device=self.device)
        with xla_amp.autocast(self.device, dtype=torch.bfloat16):
            loss = self.model(noisy).float().square().mean()
        self.scaler.scale(loss * (torch.inf if number in BAD else 1.0)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        xla_amp.sync()

    def save(self):
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "device_rng": xla_amp.xla_model.get_rng_state(),
        }
        xla_amp.xla_model.save(copy.copy(state), file)
        return file.getvalue()

    @classmethod
    def load(cls, device, make, saved):
        state = torch.load(io.BytesIO(saved), weights_only=True)
        run = cls(device, make)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        xla_amp.xla_model.set_rng_state(state["device_rng"])
        return run


RUNS = [
    ("xla", "syncfree.AdamW"),
    ("cpu", "Adagrad"),
    *(pytest.param("cpu", name, marks=pytest.mark.full) for name in OPTIMIZERS if name != "Adagrad"),
    pytest.param("xla", "wrapped RMSprop", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("where", "name"), RUNS)
def test_a_run_is_resumed(where, name):
    device = torch.device("cpu") if where == "cpu" else xla_amp.xla_device()
    make = OPTIMIZERS[name]
    x = torch.linspace(-1, 1, 24).reshape(4, 6).to(device)
    run = Run(device, make)
    checkpoints = []
    for number in range(STEPS):
        checkpoints.append(run.save())
        run.step(number, x)
    expected = run.save()
    for start, saved in enumerate(checkpoints):
        resumed = Run.load(device, make, saved)
        for number in range(start, STEPS):
            resumed.step(number, x)
        assert equal(resumed.save(), expected), f"resumed before step {start}"
    lost = Run.load(device, make, checkpoints[-1])
    torch.manual_seed(9)  # the twin: without the state of the generators it is another run
    lost.step(STEPS - 1, x)
    assert not equal(lost.save(), expected)


def equal(one: bytes, other: bytes) -> bool:
    first, second = (torch.load(io.BytesIO(saved), weights_only=True) for saved in (one, other))
    left, right = (torch.utils._pytree.tree_flatten(state) for state in (first, second))
    return left[1] == right[1] and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(left[0], right[0], strict=True)
    )
