"""Forked children: the device raises in one at once; work on the CPU, loaders and exit codes are undisturbed."""

from __future__ import annotations

import sys

import forked
import pytest

PROGRAM = """
import os, sys, time, warnings
import numpy, torch, xla_amp
from torch.utils.data import DataLoader, Dataset, TensorDataset
device = xla_amp.xla_device()
x = torch.ones(3, device=device) * 2
x.cpu()
waiting = x + 1

def child(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        process = os.fork()
    if not process:
        try:
            call()
        except RuntimeError as error:
            sys.exit(7 if "forked subprocess" in str(error) and "'spawn'" in str(error) else 8)
        sys.exit(3)
    for _ in range(6000):
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, 9)
    return "hangs"

device_calls = [
    lambda: x + 1, lambda: x.cpu(), lambda: print(waiting), lambda: torch.ones(3).to(device),
    lambda: torch.empty(3, device=device), lambda: torch.randn(3, device="jax"), lambda: torch.jax.synchronize(),
    lambda: torch.nn.Linear(2, 2).to(device), lambda: xla_amp.sync(),
]
assert [child(call) for call in device_calls] == [7] * len(device_calls)
cpu_calls = [lambda: numpy.ones(3).sum(), lambda: torch.manual_seed(1), lambda: torch.ones(3) @ torch.ones(3),
             lambda: torch.jax.is_initialized() and sys.exit(9)]
assert [child(call) for call in cpu_calls] == [3] * len(cpu_calls)

data = TensorDataset(torch.arange(8.0))
for pin in (False, True):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(data, 4, num_workers=2, pin_memory=pin)
        assert [y.to(device).sum().item() for y, in loader] == [6.0, 22.0]

class Scale(torch.nn.Module):
    def forward(self, x):
        return x * 2

class Transformed(Dataset):  # a module in each worker, as torchvision's transforms are, and one that is stepped
    def __init__(self, steps=False):
        self.transform, self.steps = Scale(), steps
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if self.steps:
            layer = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(layer.parameters(), 0.1)
            for _ in range(2):
                layer.weight.grad = layer(torch.ones(1, 1)).detach()
                optimizer.step()
        return self.transform(torch.tensor([float(index)]))

model = torch.nn.Linear(1, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.0)
choices = [dict(num_workers=1), dict(num_workers=2, persistent_workers=True, prefetch_factor=4)]
for options, steps in [(choices[0], False), (choices[1], False), (choices[0], True)]:
    loader = DataLoader(Transformed(steps), 4, multiprocessing_context="fork", **options)
    for epoch in range(2):
        seen = []
        for y in loader:
            model(y.to(device)).sum().backward()
            optimizer.step()  # the next epoch's workers are forked while this awaits the next forward pass
            seen.append(y.sum().item())
        assert seen == [12.0, 44.0], seen
assert model(torch.ones(1, 1, device=device)).isfinite().item()

class OnDevice(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.ones(2, device="jax") * index

try:
    next(iter(DataLoader(OnDevice(), num_workers=1)))
    raise SystemExit("a worker used the device")
except RuntimeError as error:
    assert "forked subprocess" in str(error), error

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    process = os.fork()  # not a loader: JAX's warning stays
    if not process:
        os._exit(0)
os.waitpid(process, 0)
assert any("JAX is multithreaded" in str(warning.message) for warning in caught)
assert waiting.tolist() == [3.0, 3.0, 3.0]
print("all well")
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")
def test_forked_children() -> None:
    assert "all well" in forked.run(program=PROGRAM, whole_end=True, JAX_PLATFORMS="cpu").stdout
