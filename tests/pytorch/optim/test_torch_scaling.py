"""torch's own tests of gradient scaling, adapted to the CPU and the lazy device.

Named after torch's tests (`test_grad_scaling_*`).  Where two devices are asked for, the other one is the CPU.
"""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp import GradScaler

INF, NAN = float("inf"), float("nan")


# ---- the check of gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [None, 0, -1])
@pytest.mark.parametrize("value", [INF, NAN])
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


# ---- training --------------------------------------------------------------------------------------------------------


def models(device, optimizer_class=torch.optim.SGD, **options):
    """Two models with the same parameters, one to be scaled and one as a control, with their optimizers and data."""
    torch.manual_seed(0)
    control = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    scaled = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    scaled.load_state_dict(control.state_dict())
    data = [(torch.randn(8, 8).to(device), torch.randn(8, 8).to(device)) for _ in range(4)]
    make = [optimizer_class(model.parameters(), **{"lr": 1.0, **options}) for model in (control, scaled)]
    return control, scaled, *make, data


def run_scaling(device, run, skip_at=2, unskipped=3, backoff=0.5, **options):
    """Trains both models and compares; `run(data, model, optimizer, scaler, skip_at, scaling)` is the loop."""
    for enabled in (True, False):
        control, scaled, control_optimizer, optimizer, data = models(device, **options)
        scaler = GradScaler(device, init_scale=128.0, growth_factor=2.0, enabled=enabled, growth_interval=1)
        run(data, control, control_optimizer, scaler, skip_at, False)
        after = run(data, scaled, optimizer, scaler, skip_at, True) or scaler
        if enabled:
            assert after.get_scale() == 128.0 * 2.0**unskipped * backoff
        else:
            assert after.get_scale() == 1.0
        for ours, theirs in zip(scaled.parameters(), control.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def loop(prepare=lambda scaler, optimizer, model: None, autocast=contextlib.nullcontext):
    def run(data, model, optimizer, scaler, skip_at, scaling):
        for number, (x, target) in enumerate(data):
            optimizer.zero_grad()
            with autocast():
                loss = nn.functional.mse_loss(model(x), target)
            if not scaling:
                loss.backward()
                prepare(None, optimizer, model)
                if not scaler.is_enabled() or number != skip_at:
                    optimizer.step()
                continue
            scaler.scale(loss).backward()
            if number == skip_at and scaler.is_enabled():
                with torch.no_grad():
                    model[1].weight.grad.fill_(INF)
            prepare(scaler, optimizer, model)
            scaler.step(optimizer)
            scaler.update()
            if scaler.is_enabled() and number == 1:
                scaler = pickle.loads(pickle.dumps(scaler))
        return scaler

    return run


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"foreach": True}),
        ("SGD", {"fused": True}),
        ("AdamW", {"lr": 0.05}),
        ("AdamW", {"lr": 0.05, "fused": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("casts", [False, True], ids=["", "autocast"])
def test_autocast_with_optimizers_and_pickling(device, name, options, casts):
    autocast = (lambda: xla_amp.autocast(device, dtype=torch.bfloat16)) if casts else contextlib.nullcontext
    options = {"lr": 0.1, **options}
    run_scaling(device, loop(autocast=autocast), optimizer_class=getattr(torch.optim, name), **options)


def test_clipping_of_scaled_gradients(device):
    def clip(scaler, optimizer, model):
        size = 0.2 * (scaler.get_scale() if scaler is not None else 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), size)

    run_scaling(device, loop(clip))


def test_clipping_with_a_separate_unscale(device):
    def clip(scaler, optimizer, model):
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)

    run_scaling(device, loop(clip))


def test_penalty(device):
    def run(data, model, optimizer, scaler, skip_at, scaling):
        for number, (x, target) in enumerate(data):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            scaled = scaler.scale(loss) if scaling else loss
            grads = torch.autograd.grad(scaled, model.parameters(), create_graph=True)
            if scaling:
                grads = [grad * (1.0 / scaler.get_scale()) for grad in grads]
            norm = sum(grad.pow(2).sum() for grad in grads).sqrt()
            loss = loss + norm
            if not scaling:
                loss.backward()
                if not scaler.is_enabled() or number != skip_at:
                    optimizer.step()
                continue
            scaler.scale(loss).backward()
            if number == skip_at and scaler.is_enabled():
                model[1].weight.grad.detach().fill_(INF)
            scaler.step(optimizer)
            scaler.update()

    run_scaling(device, run, lr=0.1)


def test_accumulation(device):
    def run(data, model, optimizer, scaler, skip_at, scaling):
        for number, (x, target) in enumerate(data):
            loss = nn.functional.mse_loss(model(x), target) / 2
            (scaler.scale(loss) if scaling else loss).backward()
            if number % 2:
                if scaling:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                optimizer.zero_grad()

    run_scaling(device, run, unskipped=2, backoff=1.0, lr=0.1)  # two steps, none of them skipped


def test_several_models_and_optimizers(device):
    control, scaled, _, _, data = models(device)
    pairs = []
    for model in (control, scaled):
        pairs.append(
            [
                torch.optim.SGD(model[0].parameters(), lr=0.5),
                torch.optim.SGD(model[1].parameters(), lr=0.25, momentum=0.9),
            ]
        )
    scaler = GradScaler(device, init_scale=128.0, growth_interval=1)
    for number, (x, target) in enumerate(data):
        for model, optimizers, scaling in ((control, pairs[0], False), (scaled, pairs[1], True)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            hidden = model[0](x)
            losses = [nn.functional.mse_loss(model[1](hidden), target), hidden.square().mean() * 0.5]
            scale = scaler.scale if scaling else lambda loss: loss
            scale(losses[0]).backward(retain_graph=True)
            scale(losses[1]).backward()
            if number == 2 and scaling:
                model[1].weight.grad.fill_(INF)
            if scaling:
                scaler.unscale_(optimizers[0])
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            else:
                optimizers[0].step()
                if number != 2:
                    optimizers[1].step()
    assert scaler.get_scale() == 128.0 * 2**3 / 2
    for ours, theirs in zip(scaled.parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class PassedItself(torch.optim.SGD):
    """Takes part by torch's older contract: its step gets the scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        state = grad_scaler._per_optimizer_states[id(self)]
        if not state["found_inf_per_device"]:
            state["found_inf_per_device"] = grad_scaler._check_inf_per_device(self)
        self.seen = grad_scaler
        if not sum(flag.item() for flag in state["found_inf_per_device"].values()):
            inverse = 1 / grad_scaler.get_scale()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(inverse)
            super().step()


def test_pass_itself(device):
    weight = nn.Parameter(torch.ones(2, device=device))
    optimizer = PassedItself([weight], lr=1.0)
    scaler = GradScaler(device, init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        scaler.step(optimizer)
    scaler.update()
    assert optimizer.seen is scaler
    assert weight.tolist() == [0.0, 0.0]


def test_gradients_that_break_after_unscale(device):
    weight = nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler(device, init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    weight.grad.fill_(INF)  # goes unnoticed, as in torch: the check was `unscale_`'s
    scaler.step(optimizer)
    assert weight.tolist() == [-INF, -INF]


def test_gradients_on_two_devices():
    device = xla_amp.xla_device()
    for bad in (None, 0, 1):
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device=device))]
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler = GradScaler(device, init_scale=4.0)
        scaler.scale([params[0].sum(), params[1].sum()])
        for parameter in params:
            parameter.grad = torch.full_like(parameter, 4.0)
        if bad is not None:
            params[bad].grad[0] = NAN
        scaler.step(optimizer)
        scaler.update()
        assert [parameter.tolist() for parameter in params] == [[0.0, 0.0] if bad is None else [1.0, 1.0]] * 2
        assert scaler.get_scale() == (4.0 if bad is None else 2.0)


def test_scale_of_outputs_on_two_devices():
    device = xla_amp.xla_device()
    scaler = GradScaler(device, init_scale=4.0)
    on_host, here = scaler.scale([torch.ones(()), torch.ones((), device=device)])
    assert (on_host.device.type, here.device) == ("cpu", device)
    assert (on_host.item(), here.item()) == (4.0, 4.0)
