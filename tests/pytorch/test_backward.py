"""Backward passes on the XLA device in a process whose first one was on the CPU."""

from __future__ import annotations

import subprocess

import forked

PROGRAM = """
import threading
import torch

torch.ones(2, requires_grad=True).sum().backward()
import xla_amp

def work(device):
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    return weight.grad.tolist()

{start}
print(work(device))
for asked in (xla_amp.xla_device, lambda: device):
    thread = threading.Thread(target=lambda: print(work(asked())))
    thread.start()
    thread.join()
print(work("cpu"))
"""


def run(start: str) -> subprocess.CompletedProcess[str]:
    return forked.run(program=PROGRAM.format(start=start))


def test_a_backward_pass_came_first():
    result = run("device = xla_amp.xla_device()")
    assert result.stdout.splitlines() == [str([[4.0, 4.0], [4.0, 4.0]])] * 4, result.stderr


def test_without_our_help_it_fails():
    # The twin of the test above; when it passes, `backward_threads` can go.
    result = run("from xla_amp import lazy; device = lazy.device()")
    assert "device_ready_queues_" in result.stderr
