"""Fake quantization against torch's own kernels on the CPU, and training with torch.ao's observers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from harness import assert_same, check, sample

import xla_amp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated in torch 2.13
    from torch.ao import quantization

F32, I32 = torch.float32, torch.int32


def test_fake_quantization():
    """Scales are powers of two, for which both round the same quotients."""
    x = 4 * sample(3, 3, 2)
    scale, zero = torch.tensor([0.25, 0.5, 0.0625]), torch.tensor([0, 1, -2], dtype=I32)
    for dtype in (F32, torch.float64):
        check("fake_quantize_per_tensor_affine_cachemask", x.to(dtype), 0.125, 3, 0, 15)
    for on in (0, 1):
        given = (scale[:1], zero[2:], torch.tensor([on]), -8, 7)
        check("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", x, *given)
    for axis in (0, 1):
        check("fake_quantize_per_channel_affine_cachemask", x, scale, zero, axis, -8, 7)


def test_observed_grids():
    """The helper's results, and the extremes, scale and zero point that it writes, of each kind of range."""
    inf, rows = torch.tensor(math.inf), torch.tensor([math.inf, -0.5, -1.0])
    shifts = {"both signs": 0.1, "positive": 9.0, "negative": -9.0}
    for x in (sample(3, 4, 2), 1e-4 * sample(3, 4, 2), 1e-42 * sample(3, 4, 2), torch.zeros(3, 4)):
        for shift, symmetric in ((shift * x.abs().max(), bool(i % 2)) for i, shift in enumerate(shifts.values())):
            for low, high in ((0, 255), (-128, 127)):
                for observe, quantize in ((1, 1), (1, 0)):
                    flags = torch.tensor([observe]), torch.tensor([quantize])
                    state = torch.ones(1), torch.zeros(1, dtype=I32)
                    numbers = 0.25, low, high
                    check("_fused_moving_avg_obs_fq_helper", x + shift, *flags, inf, -inf, *state, *numbers, -1)
                    running = torch.full((3,), -1.75), torch.full((3,), 2.25), torch.ones(3), torch.zeros(3, dtype=I32)
                    options = *numbers, 0, True, symmetric
                    check("_fused_moving_avg_obs_fq_helper", x + shift, *flags, *running, *options)
    check("_fused_moving_avg_obs_fq_helper", sample(3, 4), *flags, rows, -rows, *running[2:], *numbers, 0, True, True)


def trained(where: str, qconfig: Any) -> list[Any]:
    """Losses of eight steps with the observers off from the sixth, the state, and what the converted model computes."""
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()
    stubs = quantization.QuantStub(), quantization.DeQuantStub()
    model = torch.nn.Sequential(stubs[0], *layers, torch.nn.Linear(64, 2), stubs[1]).train()
    model.qconfig = qconfig
    quantization.fuse_modules_qat(model, [["1", "2", "3"]], inplace=True)
    quantization.prepare_qat(model, inplace=True)
    model.to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, waits = [], 0
    for i in range(8):
        if i == 5:
            model.apply(quantization.disable_observer)
        if i == 2:
            waits = xla_amp.metrics()["host_syncs"]
        x, y = sample(8, 3, 6, 6, seed=i).to(where), (torch.arange(8) % 2).to(where)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert xla_amp.metrics()["host_syncs"] == waits
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.cpu().eval()
    return [losses, state, quantization.convert(model)(sample(8, 3, 6, 6))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["fbgemm", pytest.param("qnnpack", marks=pytest.mark.full)])
def test_training_with_observers(backend):
    """The default configurations, of channels and of tensors: as on the CPU and without a wait, and they convert."""
    qconfig = quantization.get_default_qat_qconfig(backend)
    assert_same(lambda where: trained(where, qconfig), rtol=1e-4, atol=1e-5)
