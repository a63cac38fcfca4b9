"""Steps with a flag of one process's own, for test_flag_agreement.py; run as a program it writes what each saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import xla_amp
from xla_amp import syncfree

OPTIMIZERS = {
    "SGD": lambda p: syncfree.SGD(p, lr=0.5),
    "AdamW": lambda p: syncfree.AdamW(p, lr=0.5),
    "RMSprop": lambda p: syncfree.wrap(torch.optim.RMSprop(p, lr=0.5)),
}


def train(rank, folder):
    device = xla_amp.xla_device()
    seen = {}
    for name, make in OPTIMIZERS.items():
        for where in (device, "cpu"):
            weight = nn.Parameter(torch.ones(3).to(device))
            optimizer = make([weight])
            values = []
            for bad in (None, 1, None, 0):  # in which process the flag is set
                weight.grad = torch.ones(3).to(device)
                optimizer.step(found_inf=torch.tensor(float(bad == rank)).to(where))
                values.append(weight.detach()[0].clone())
                xla_amp.sync()
            seen[f"{name} {where}"] = [value.item() for value in values]
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    xla_amp.launch(train, 2, (sys.argv[1],))
