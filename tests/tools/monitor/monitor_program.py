"""Two processes that train with a monitor and look for the operation of the bad step; for test_monitor_processes.py.

Run as a program it writes what each process saw.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import xla_amp

BAD, BAD_RANK, ELEMENT = 3, 1, 2


def make():
    torch.manual_seed(0)
    device = xla_amp.xla_device()
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 2)).to(device)
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.1)
    scaler = xla_amp.GradScaler(init_scale=64.0)

    def step(x):
        optimizer.zero_grad()
        with xla_amp.autocast(device, dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), torch.ones_like(x[:, :2]))
        scaler.scale(loss).backward()
        if xla_amp.xla_model.xrt_world_size() > 1:
            xla_amp.xla_model.reduce_gradients(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, optimizer, scaler, step


def train(rank, folder):
    model, optimizer, scaler, step = make()
    monitor = xla_amp.monitor(model, optimizer, scaler, directory=Path(folder, "run"))
    made = torch.Generator().manual_seed(rank)
    for index in range(6):
        x = torch.randn(4, 4, generator=made)
        x[ELEMENT] *= 1e7 if (index, rank) == (BAD, BAD_RANK) else 1.0
        x = x.to(xla_amp.xla_device())
        with monitor.step(x) as running:
            running.loss = step(x)
    monitor.close()
    seen = {
        "kept": str(monitor.kept.relative_to(folder)),
        "skipped": monitor.history.of("skipped"),
        "norms": monitor.history.of("gradient_norm"),
        "largest": dict(monitor.history.steps[BAD].largest),
        "nonfinite": len(monitor.history.steps[BAD].nonfinite),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    xla_amp.launch(train, 2, (sys.argv[1],))
    found = {}
    for each in range(2):  # in one process, on the file of each
        run = Path(sys.argv[1], "run", f"step-{BAD}")
        if each == 1:
            (run / "rank-0.pt").unlink()
        first = xla_amp.find_overflow(make()[3], kept=run).first
        found[each] = first and first.place.module
    Path(sys.argv[1], "alone.json").write_text(json.dumps(found))
