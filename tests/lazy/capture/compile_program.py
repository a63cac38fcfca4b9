"""A few captured steps with the persistent cache on; prints what was compiled and the bits of the results."""

from __future__ import annotations

import json
import sys

import jax
import torch
import torch.nn.functional as F

import xla_amp
from xla_amp.lazy.programs.compilation_cache import compilation_cache

EVENTS = {"/jax/compilation_cache/cache_hits": "hits", "/jax/compilation_cache/cache_misses": "misses"}


def main(folder: str) -> None:
    counts = dict.fromkeys(EVENTS.values(), 0)

    def count(event, **_):
        if event in EVENTS:
            counts[EVENTS[event]] += 1

    jax.monitoring.register_event_listener(count)
    device = xla_amp.xla_device()
    if folder:
        compilation_cache(folder)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(device)
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @xla_amp.compile(strict=True)
    def step(x, y):
        optimizer.zero_grad()
        with xla_amp.autocast(device):
            loss = F.cross_entropy(F.dropout(model(x), 0.2), y)
        loss.backward()
        optimizer.step()
        return loss

    x, y = torch.randn(6, 8).to(device), torch.randint(4, (6,)).to(device)
    losses = [step(x, y) for _ in range(5)]
    print(json.dumps({**counts, "losses": torch.stack(losses).tolist(), "replays": step.replays}))


if __name__ == "__main__":
    main(*sys.argv[1:])
