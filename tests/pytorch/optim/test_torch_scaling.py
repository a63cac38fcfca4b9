"""torch's own tests of gradient scaling, adapted to the CPU and the lazy device.

Named after torch's tests (`test_grad_scaling_*`).  Where two devices are asked for, the other one is the CPU.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp import GradScaler

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("place", "value"), [(None, INF), (0, NAN), (-1, INF)])
def test_unscale_of_several_dtypes(place, value):
    device = xla_amp.xla_device()
    for dtype in (torch.float32, torch.float16, torch.float64, torch.bfloat16):
        grads = [torch.full((5, 5), 4.0, dtype=dtype, device=device) for _ in range(3)]
        grads.append(torch.full((5, 5), 4.0, dtype=dtype, device=device).t())  # not contiguous
        if place is not None:
            grads[place][2, 3] = value
        found, inverse = torch.zeros((), device=device), torch.full((), 0.25, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
        assert found.item() == (place is not None)
        for index, grad in enumerate(grads):
            expected = torch.ones(5, 5, dtype=dtype)
            if place is not None and index == place % len(grads):
                expected[2, 3] = value
            torch.testing.assert_close(grad.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unscale_sparse(device, dtype):
    scaler = GradScaler(device)
    inverse, found = torch.full((), 0.25, device=device), torch.zeros((), device=device)
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=dtype, device=device))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]], device=device)
    for values, bad in [([16.0, 32.0, 64.0], 0), ([16.0, INF, 64.0], 1), ([16.0, 32.0, NAN], 1)]:
        parameter.grad = torch.sparse_coo_tensor(
            indices, torch.tensor(values, dtype=dtype, device=device), (2, 3), check_invariants=True
        )
        found.zero_()
        flags = scaler._unscale_grads_(optimizer, inverse, found, True)
        assert flags[device].item() == bad
        if not bad:
            torch.testing.assert_close(
                parameter.grad.to_dense().cpu(), torch.tensor([[0, 0, 4.0], [8.0, 0, 16.0]]).to(dtype), rtol=0, atol=0
            )
    # Each value is finite in float16, and their sum is not.
    twice = torch.tensor([[1, 1, 1], [0, 0, 2]], device=device)
    values = torch.tensor([64000.0, 64000.0, 1.0], dtype=dtype, device=device)
    parameter.grad = torch.sparse_coo_tensor(twice, values, (2, 3), check_invariants=True)
    found.zero_()
    assert scaler._unscale_grads_(optimizer, inverse, found, True)[device].item() == (dtype is torch.float16)


def model_and_optimizer(device, optimizer_class, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    return model, optimizer_class(model.parameters(), **{"lr": 0.1, **options})


def penalty(loss, model, scale):
    """Adds the norm of the gradients, which a scaled loss gives times the scale."""
    grads = torch.autograd.grad(loss * scale, model.parameters(), create_graph=True)
    return loss + sum((grad / scale).pow(2).sum() for grad in grads).sqrt()


def clip_scaled(scaler, optimizer, model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.2 * scaler.get_scale())


def clip_unscaled(scaler, optimizer, model):
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)


LOOPS = {
    "autocast": {"casts": True},
    "scaled gradients clipped": {"prepare": clip_scaled, "foreach": True},
    "clipped, fused": {"prepare": clip_unscaled, "optimizer_class": torch.optim.AdamW, "fused": True},
    "penalty": {"add": penalty},
    "accumulation": {"every": 2},
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(device, name):
    """Against the same loop without a scaler, which leaves the step out whose gradients are not finite."""
    options = dict(LOOPS[name])
    prepare, add = options.pop("prepare", lambda *_: None), options.pop("add", lambda loss, *_: loss)
    casts, every = options.pop("casts", False), options.pop("every", 1)
    optimizer_class = options.pop("optimizer_class", torch.optim.SGD)
    generator = torch.Generator().manual_seed(1)
    data = [[torch.randn(8, 8, generator=generator).to(device) for _ in "xy"] for _ in range(4 * every)]
    scalers = [GradScaler(device, init_scale=128.0, growth_interval=1, enabled=on) for on in (True, False)]
    weights = []
    for scaled, scaler in zip((True, False), scalers, strict=True):
        model, optimizer = model_and_optimizer(device, optimizer_class, options)
        for number, (x, target) in enumerate(data):
            with xla_amp.autocast(device, dtype=torch.bfloat16, enabled=casts):
                loss = nn.functional.mse_loss(model(x).float(), target) / every
            scaler.scale(add(loss, model, scaler.get_scale())).backward()
            if number % every < every - 1:
                continue
            bad = number == 3 * every - 1
            if bad and scaled:
                model[1].weight.grad.detach().fill_(INF)
            if scaled or not bad:
                prepare(scaler, optimizer, model)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            scaler = pickle.loads(pickle.dumps(scaler))
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
        assert scaler.get_scale() == (128.0 * 2**3 / 2 if scaler.is_enabled() else 1.0)
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)


def test_gradients_on_two_devices():
    device = xla_amp.xla_device()
    for bad in (None, 0, 1):
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device=device))]
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler = GradScaler(device, init_scale=4.0)
        on_host, here = scaler.scale([params[0].sum(), params[1].sum()])
        assert (on_host.device.type, here.device) == ("cpu", device)
        assert (on_host.item(), here.item()) == (8.0, 8.0)
        for parameter in params:
            parameter.grad = torch.full_like(parameter, 4.0)
        if bad is not None:
            params[bad].grad[0] = NAN
        scaler.step(optimizer)
        scaler.update()
        assert [parameter.tolist() for parameter in params] == [[0.0, 0.0] if bad is None else [1.0, 1.0]] * 2
        assert scaler.get_scale() == (4.0 if bad is None else 2.0)
