"""A training program for ``torchrun --max-restarts``, for test_disagreement.py: ``elastic_program.py FOLDER``.

Process 1 kills itself the first time that it is started.  Then FOLDER gets what each process found, ``RANK.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp import xla_model as xm

STEPS, EVERY, LAST = 12, 3, 8
"""Steps, steps between checkpoints, and the step in which process 1 ends."""


def train(folder, rank, world, device, *, kill=False):
    """Goes on from the checkpoint in `folder`; returns the first step, and the losses by step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)
    scaler = xla_amp.GradScaler(device, init_scale=2.0**10, growth_interval=4)
    xm.set_rng_state(rank)  # another dropout in each process
    first, file = 0, Path(folder, "last.pt")
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        first = saved["step"] + 1
    losses = {}
    for step in range(first, STEPS):
        torch.manual_seed(1000 * step + rank)  # what a step draws depends on its number and the process
        x, y = torch.randn(4, 8).to(device), torch.randint(4, (4,)).to(device)
        optimizer.zero_grad()
        with xla_amp.autocast(device):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if kill and step == LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        xm.reduce_gradients(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses[step] = loss.item()
        if step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            xm.save({**state, "step": step}, file)
    weights = [p.detach().cpu().numpy().tobytes().hex() for p in model.parameters()]
    return {"first": first, "losses": losses, "weights": weights}


def main(folder):
    device = xla_amp.xla_device()
    rank, world = xm.get_ordinal(), xm.xrt_world_size()
    again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    disturbed = train(folder, rank, world, device, kill=rank == 1 and again == 0)
    other = Path(folder, "undisturbed")
    other.mkdir(exist_ok=True)
    found = {"restarts": again, "disturbed": disturbed, "undisturbed": train(other, rank, world, device)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
