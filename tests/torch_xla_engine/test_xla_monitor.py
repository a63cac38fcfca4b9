"""`monitor` on torch_xla: statistics of each layer, the first bad step on disk, and its replay."""

from __future__ import annotations

import math

import torch
from torch import nn

import xla_amp
from xla_amp.tools.monitor.history import ValueKey
from xla_amp.tools.monitor.on_pytorch.replay import replay

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


def make():
    """Model, optimizer, scaler and step: linear in float16, where the bad batch overflows."""
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

    return model, optimizer, scaler, step


def test_statistics_are_those_of_the_cpu():
    model, reference = network().to("xla"), network()
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    recorder = xla_amp.monitor(model, optimizer, sample=1, low="float16")
    seen = []
    reference[0].register_forward_hook(lambda _module, _args, output: seen.append(output.detach().double()))
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
    last = recorder.read().steps[-1].statistics
    gradient = torch.cat([p.grad.flatten() for p in reference[2].parameters()]).double()
    for key, want in ((ValueKey("0", "activation"), seen[-1]), (ValueKey("2", "gradient"), gradient)):
        assert math.isclose(last[key].amax, want.abs().max().item(), rel_tol=1e-4)
        assert math.isclose(last[key].rms, want.square().mean().sqrt().item(), rel_tol=1e-4)
    recorder.close()


def test_the_first_bad_step_is_kept_and_replayed(tmp_path):
    model, optimizer, scaler, step = make()
    recorder = xla_amp.monitor(model, optimizer, scaler, directory=tmp_path, sample=1, save_state=True)
    for x, y in batches(BAD + 3):
        moved = x.to("xla"), y.to("xla")
        with recorder.step(*moved) as running:
            running.loss = step(*moved)
        xla_amp.sync()
    history = recorder.read()
    recorder.close()
    assert [record.skipped for record in history.steps] == [number == BAD for number in range(BAD + 3)]
    [kept] = tmp_path.glob("bad_step_*")
    assert kept.name == f"bad_step_{BAD:07}"
    report = replay(tmp_path, make)
    assert report.reproduced, report.differences
    assert report.compared > 50
    assert report.elements == (ELEMENT,)
    assert report.overflow.first.place.module == "0"
