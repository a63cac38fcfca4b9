"""Two processes that train with a monitor and replay the step that one of them made bad; for test_monitor_processes.py.

Run as a program it writes what each process saw.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import xla_amp
from xla_amp.tools.monitor import bad_step, history
from xla_amp.tools.monitor.on_pytorch import replay as replay_step

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
    run = Path(folder, "run")
    monitor = xla_amp.monitor(model, optimizer, scaler, directory=run, save_state=True, sample=1)
    made = torch.Generator().manual_seed(rank)
    for index in range(6):
        x = torch.randn(4, 4, generator=made)
        x[ELEMENT] *= 1e7 if (index, rank) == (BAD, BAD_RANK) else 1.0
        x = x.to(xla_amp.xla_device())
        with monitor.step(x) as running:
            running.loss = step(x)
    monitor.close()
    bad = bad_step.read(monitor.bad_step)
    name = "history_rank_1.jsonl" if rank else "history.jsonl"
    xla_amp.xla_model.rendezvous("kept")
    found = replay_step.replay(run, make)
    seen = {
        "step": bad.step,
        "local": bad.local,
        "steps": [record.step for record in history.read(run / name).steps],
        "norms": [record.gradient_norm for record in monitor.history.steps],
        "differences": found.differences,
        "compared": found.compared,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    xla_amp.launch(train, 2, (sys.argv[1],))
    report = replay_step.replay(Path(sys.argv[1], "run"), make)
    seen = {
        "rank": report.bad.rank,
        "elements": report.elements,
        "differences": report.differences,
        "compared": report.compared,
        "notes": report.notes,
    }
    Path(sys.argv[1], "alone.json").write_text(json.dumps(seen))
