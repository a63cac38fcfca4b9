"""Pairs of processes that come to disagree, for test_disagreement.py: ``disagree_program.py FOLDER SECONDS CASE...``.

All pairs run at a time, as copies of this process.  FOLDER gets the text of each process, ``CASE-RANK``, and
``codes.json`` with the exit status and the seconds of each case.  SECONDS is how long they wait for each other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from threading import Thread

import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp import xla_model as xm
from xla_amp.lazy.processes import launch

FIRST, STEPS = 4, 8
"""The step that goes another way, and how many steps there are."""
STOPPED = 20.0
"""Seconds that process 1 is stopped."""


def go_another_way(case, loss):
    """What process 1 does in step `FIRST`, after the forward pass, beside what process 0 does."""
    if case == "read":
        print("read", float(loss))
    elif case == "raise":
        raise ValueError("this one has had enough")
    elif case == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stop":
        Path(f"{case}.stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


def train(case, rank):
    device = xla_amp.xla_device()
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    for step in range(STEPS):
        other = step == FIRST and rank == 1
        if case == "kill first" and step == FIRST and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if other and case == "end":
            return
        x = torch.randn(5 if other and case == "shape" else 4, 8).to(device)
        optimizer.zero_grad()
        own = 1.0 + rank if case == "factor" else 1.0  # of this process's batch
        loss = own * F.mse_loss(model(x), x)
        if case == "hold, function":  # a program with a user's function has no description
            loss = xla_amp.jax.torch_function(lambda value: value * 2)(loss)
        if other:
            go_another_way(case, loss)
        loss.backward()
        xm.optimizer_step(optimizer)
        xm.all_reduce(xm.REDUCE_MAX, [loss.detach()])
        xla_amp.sync(wait=True)
        # The next program cannot overwrite what this still holds.
        held = [xla_amp.jax.to_jax(each.detach()) for each in model.parameters()] if other and "hold" in case else []
    del held
    print("finished", model.weight.sum().item())


def watch(folder, started):
    """Waits for all processes; wakes the stopped ones when it is time."""
    begin, codes = time.monotonic(), {}
    if any(name == "stop" for name, _ in started.values()):
        Thread(target=wake, args=("stop",), daemon=True).start()
    while started:
        pid, status = os.wait()
        case, rank = started.pop(pid)
        codes[f"{case}-{rank}"] = [os.waitstatus_to_exitcode(status), time.monotonic() - begin]
    Path(folder, "codes.json").write_text(json.dumps(codes))


def wake(case):
    file = Path(f"{case}.stopped")
    while not file.exists():
        time.sleep(0.1)
    time.sleep(max(0.0, file.stat().st_mtime + STOPPED - time.time()))
    os.kill(int(file.read_text()), signal.SIGCONT)


def main():
    folder, seconds, *cases = sys.argv[1:]
    os.chdir(folder)
    started = {}
    for case in cases:
        port = str(launch._two_ports())
        for rank in range(2):
            pid = os.fork()
            if pid:
                started[pid] = case, rank
                continue
            file = os.open(f"{case}-{rank}", os.O_RDWR | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "XLA_AMP_TIMEOUT": seconds}
            return train(case, rank)
    return watch(folder, started)


if __name__ == "__main__":
    main()
