"""`monitor` on torch_xla: a bad step, which `find_overflow` runs; its numbers are those of every device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import xla_amp

BAD, ELEMENT = 3, 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(count)]
    made[BAD][0][ELEMENT] *= 1e6
    return made


def test_a_bad_step_is_named_and_found():
    model = network().to("xla")
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.1)
    scaler = xla_amp.GradScaler(init_scale=8.0)

    def step(x, y):
        optimizer.zero_grad()
        with xla_amp.autocast("xla", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    recorder = xla_amp.monitor(model, optimizer, scaler)
    with pytest.warns(UserWarning, match=f"step {BAD} is bad: .*the first layer with an inf or NaN is 0"):  # noqa: PT031
        for x, y in batches(BAD + 3):
            moved = x.to("xla"), y.to("xla")
            with recorder.step() as running:
                running.loss = step(*moved)
            xla_amp.sync()
        found = recorder.read()
    assert found.of("skipped") == [number == BAD for number in range(BAD + 3)]
    recorder.close()
    report = xla_amp.find_overflow(step, *[tensor.to("xla") for tensor in batches(BAD + 1)[BAD]])
    assert report.scale == 4.0
    assert report.first.place.module == "0"
