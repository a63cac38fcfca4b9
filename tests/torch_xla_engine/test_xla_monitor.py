"""`monitor` on torch_xla: numbers of each step, and the first bad step, which `find_overflow` runs."""

from __future__ import annotations

import math

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
    if count > BAD:
        made[BAD][0][ELEMENT] *= 1e6
    return made


def test_numbers_are_those_of_the_cpu():
    model, reference = network().to("xla"), network()
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    recorder = xla_amp.monitor(model, optimizer)
    seen = []
    reference[0].register_forward_hook(lambda _module, _args, output: seen.append(output.detach().abs().max().item()))
    for x, y in batches(BAD):
        with recorder.step(x, y) as running:
            optimizer.zero_grad()
            running.loss = nn.functional.cross_entropy(model(x.to("xla")), y.to("xla"))
            running.loss.backward()
            optimizer.step()
        plain.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        plain.step()
        xla_amp.sync()
    last = recorder.read().steps[-1]
    recorder.close()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in reference.parameters()))
    assert math.isclose(last.largest["0"], seen[-1], rel_tol=1e-4)
    assert math.isclose(last.gradient_norm, norm, rel_tol=1e-4)


def test_the_first_bad_step_is_kept_and_found(tmp_path):
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

    recorder = xla_amp.monitor(model, optimizer, scaler, directory=tmp_path)
    with pytest.warns(UserWarning, match=f"step {BAD} is bad: .*the first layer with an inf or NaN is 0"):  # noqa: PT031
        for x, y in batches(BAD + 3):
            moved = x.to("xla"), y.to("xla")
            with recorder.step(*moved) as running:
                running.loss = step(*moved)
            xla_amp.sync()
    assert recorder.read().of("skipped") == [number == BAD for number in range(BAD + 3)]
    recorder.close()
    report = xla_amp.find_overflow(step, kept=tmp_path / f"step-{BAD}")
    assert report.scale == 8.0
    assert report.first.place.module == "0"
