"""`GradScaler` and `syncfree` on torch_xla: right where its native operations are not, and one program per step.

The reference is torch.optim in float64, or the rule of `xla_amp.common.loss_scaling` worked out by hand.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as counters
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree
from xla_amp.backends import base
from xla_amp.backends.torch_xla import amp_kernels, fused_optimizers

SHAPES = [(5, 3), (4,), ()]
STEPS = 5
OPTIONS = [
    ("SGD", {"weight_decay": 0.1, "maximize": True}),  # torch_xla's own: weight decay has the wrong sign
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": torch.tensor(0.05)}),
    ("Adam", {"weight_decay": 0.1, "maximize": True, "amsgrad": True}),
    ("Adam", {"betas": (0.0, 0.999999)}),  # torch_xla's own: 1 - beta in float32
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),  # torch_xla's own ignores it
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": torch.tensor(0.01)}),
]


def parameters(device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params:
        gradient = torch.randn(parameter.shape, generator=generator) * factor
        parameter.grad = gradient.to(parameter.dtype).to(parameter.device)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_steps_are_those_of_torch(name, options):
    ours, reference = parameters("xla", torch.float32), parameters("cpu", torch.float64)
    optimizer = getattr(syncfree, name)(ours, **options)
    plain = getattr(torch.optim, name)(reference, **options)
    bad = torch.tensor(1.0).to("xla")
    for step in range(STEPS):
        set_gradients(ours, step, factor=float("nan"))
        optimizer.step(found_inf=bad)  # before every step one that must leave nothing behind, the first included
        set_gradients(ours, step)
        set_gradients(reference, step)
        optimizer.step()
        plain.step()
        torch_xla.sync()
    for mine, right in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.detach().cpu().double(), right.detach(), rtol=1e-5, atol=1e-6)
    for mine, right in zip(ours, reference, strict=True):
        state, wanted = optimizer.state[mine], plain.state[right]
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            if value is not None:
                torch.testing.assert_close(state[key].cpu().double(), value.double(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adagrad", {"fused": True, "lr_decay": 0.1, "weight_decay": 0.1}),
        ("Adagrad", {"fused": True, "maximize": True}),
        ("Adam", {"fused": True, "amsgrad": True}),
        ("AdamW", {"fused": True}),
        ("SGD", {"fused": True, "momentum": 0.9, "nesterov": True}),
        ("Adadelta", {}),
    ],
    ids=str,
)
def test_torchs_own_optimizers_step_on_the_device(name, options):
    """torch refuses `fused` for XLA, and asks where Adadelta's count may be without naming XLA: ours enter it."""
    ours, reference = parameters("xla", torch.float32), parameters("cpu", torch.float64)
    optimizer = getattr(torch.optim, name)(ours, lr=0.1, **options)
    plain = getattr(torch.optim, name)(reference, lr=0.1, **{k: v for k, v in options.items() if k != "fused"})
    scaler = GradScaler("xla", init_scale=4.0, growth_interval=100)
    scaler.scale(torch.zeros(()).to("xla"))
    torch_xla.sync(wait=True)
    before = base.metrics()["device_to_host"]
    for step in range(STEPS):
        set_gradients(ours, step, factor=float("nan"))
        scaler.step(optimizer)
        scaler.update(4.0)
        set_gradients(ours, step, factor=4.0)
        set_gradients(reference, step)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        torch_xla.sync()
    assert base.metrics()["device_to_host"] == before
    for mine, right in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.detach().cpu().double(), right.detach(), rtol=1e-5, atol=1e-6)


def test_without_ours_torch_refuses():
    """The twin of the test above."""
    params = parameters("xla", torch.float32)
    set_gradients(params, 0)
    fused_optimizers.uninstall()
    try:
        with pytest.raises(RuntimeError, match="requires all the params to be floating point Tensors of supported"):
            torch.optim.Adam(params, fused=True).step()
    finally:
        fused_optimizers.install()
    torch.optim.Adam(params, fused=True).step()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_skipped_steps_change_no_bit(name):
    ours = parameters("xla", torch.float32)
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(syncfree, name)(ours, lr=0.1, **options)
    set_gradients(ours, 0)
    optimizer.step()
    before = copy.deepcopy([p.detach().cpu() for p in ours])
    state = [{k: v.cpu() for k, v in optimizer.state[p].items()} for p in ours]
    set_gradients(ours, 1, factor=float("inf"))
    optimizer.step(found_inf=torch.tensor([1], dtype=torch.int64).to("xla"))  # torch_xla's own cannot lower an int64
    for index, parameter in enumerate(ours):
        assert torch.equal(parameter.detach().cpu(), before[index])
        assert all(torch.equal(v.cpu(), state[index][k]) for k, v in optimizer.state[parameter].items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_other_dtypes(name, dtype):
    """Low-precision parameters are updated in float32 and rounded once; torch_xla's own fail to compile."""
    ours, reference = parameters("xla", dtype), parameters("cpu", torch.float64)
    optimizer = getattr(syncfree, name)(ours, lr=0.1)
    plain = getattr(torch.optim, name)(reference, lr=0.1)
    with torch.no_grad():
        for right, mine in zip(reference, ours, strict=True):
            right.copy_(mine.cpu())
    for params in (ours, reference):
        set_gradients(params, 0)
    for right, mine in zip(reference, ours, strict=True):
        right.grad = mine.grad.cpu().double()
    optimizer.step(found_inf=torch.zeros(()).to("xla"))
    plain.step()
    for mine, right in zip(ours, reference, strict=True):
        tolerance = torch.finfo(dtype).eps if dtype is not torch.float64 else 1e-12
        torch.testing.assert_close(mine.detach().cpu().double(), right.detach(), rtol=tolerance, atol=tolerance)


def test_state_goes_to_torch_optim_and_back():
    ours = parameters("xla", torch.float32)
    optimizer = syncfree.Adam(ours, lr=0.1, amsgrad=True)
    set_gradients(ours, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    reference = [nn.Parameter(p.detach().cpu()) for p in ours]
    plain = torch.optim.Adam(reference, lr=0.1, amsgrad=True)
    plain.load_state_dict(saved)
    other = [nn.Parameter(p.detach().clone()) for p in ours]
    back = syncfree.Adam(other, lr=0.1, amsgrad=True)
    back.load_state_dict(plain.state_dict())
    for params in (reference, other):
        set_gradients(params, 1)
    plain.step()
    back.step()
    for mine, right in zip(other, reference, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), right.detach(), rtol=1e-5, atol=1e-6)


def test_learning_rates_compile_nothing():
    """0 and 1 included, which torch_xla compiles into its programs, and 0.1, which is also 1 - beta1."""
    ours = parameters("xla", torch.float32)
    optimizer = syncfree.AdamW(ours, lr=0.1)
    compiled = []
    for step, lr in enumerate([0.1, 0.1, 0.1, 0.05, 1.0, 0.0, 0.3, 1.0]):
        optimizer.param_groups[0]["lr"] = lr
        set_gradients(ours, step)
        torch_xla.sync()
        before = base.metrics()["compilations"]
        optimizer.step(found_inf=torch.zeros(()).to("xla"))
        torch_xla.sync()
        compiled.append(base.metrics()["compilations"] - before)
    assert compiled == [1, 1, 0, 0, 0, 0, 0, 0]  # the first step makes the state


# ---- the scale -------------------------------------------------------------------------------------------------------


def updated(scale: float, tracker: int, bad: bool, growth: float = 2.0, backoff: float = 0.5, interval: int = 1):
    values = torch.full((), scale).to("xla"), torch.tensor(tracker, dtype=torch.int32).to("xla")
    torch._amp_update_scale_(*values, torch.tensor(float(bad)).to("xla"), growth, backoff, interval)
    torch_xla.sync()
    return values[0].item(), values[1].item()


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ((4.0, 0, False), (8.0, 0)),
        ((4.0, 0, False, 3.0), (12.0, 0)),  # torch_xla's own: still 8, the first factor is compiled in
        ((4.0, 0, False, 2.0, 0.5, 2), (4.0, 1)),
        ((4.0, 1, False, 2.0, 0.5, 2), (8.0, 0)),
        ((4.0, 1, True, 2.0, 0.25, 2), (1.0, 0)),
        ((2.0**127, 0, False), (2.0**127, 0)),  # torch_xla's own: infinity
        ((4.0, 0, False, 1.0), (4.0, 0)),
    ],
)
def test_the_scale(arguments, result):
    assert updated(*arguments) == result


def test_the_faults_are_torch_xlas():
    """Without our kernels: the twin of the tests above and below."""
    amp_kernels.uninstall()
    try:
        assert [updated(4.0, 0, False)[0], updated(4.0, 0, False, 3.0)[0]] == [8.0, 8.0]
        assert updated(2.0**127, 0, False)[0] == float("inf")
    finally:
        amp_kernels.install()


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")], ids=str)
def test_unscaling_gradients_of_several_dtypes(bad):
    grads = [torch.full((3,), 8.0, dtype=dtype).to("xla") for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    if bad is not None:
        grads[1][1] = bad
    found = torch.zeros(()).to("xla")
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.25).to("xla"))
    assert found.item() == (bad is not None)
    assert grads[0].tolist() == grads[2].tolist() == [2.0, 2.0, 2.0]
    assert grads[1][0].item() == 2.0


def test_gradients_of_sums():
    """Their elements share memory, and torch_xla 2.9 adds where it should overwrite."""
    weight = nn.Parameter(torch.ones(2).to("xla"))
    scaler = GradScaler("xla", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
    assert weight.grad.tolist() == [1.0, 1.0]
    weight.grad.mul_(3)
    assert weight.grad.tolist() == [3.0, 3.0]
    (other := nn.Parameter(torch.ones(2).to("xla"))).sum().backward()
    other.grad.mul_(3)
    assert other.grad.tolist() != [3.0, 3.0]  # torch_xla's own: [5, 5]; when this fails `make_own` is not needed


def test_growth_parameters_can_change():
    scaler = GradScaler("xla", init_scale=4.0, growth_interval=1)
    parameter = nn.Parameter(torch.ones(()).to("xla"))
    optimizer = syncfree.SGD([parameter], lr=0.1)
    seen = []
    for factor, loss in [(2.0, 1.0), (3.0, 1.0), (3.0, float("inf")), (1.5, 1.0)]:
        scaler.set_growth_factor(factor)
        optimizer.zero_grad()
        scaler.scale(parameter * loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch_xla.sync()
        seen.append(scaler.get_scale())
    assert seen == [8.0, 24.0, 12.0, 18.0]
    assert int(scaler.skipped_steps()) == 1


# ---- what a step costs -----------------------------------------------------------------------------------------------


def train(scaler: torch.amp.GradScaler, make, steps: int = 6) -> dict[str, float]:
    """Executions and transfers per step by torch_xla's own counters, after two steps of warming up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to("xla")
    optimizer = make(model.parameters())
    batches = [(torch.randn(4, 8).to("xla"), torch.randn(4, 1).to("xla")) for _ in range(steps + 2)]
    torch_xla.sync(wait=True)
    for index, (x, y) in enumerate(batches):
        if index == 2:
            torch_xla.sync(wait=True)
            before = counts()
        optimizer.zero_grad()
        with xla_amp.autocast("xla", policy="gpu"):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch_xla.sync(wait=True)
    after = counts()
    return {name: (after[name] - before[name]) / steps for name in after}


def counts() -> dict[str, int]:
    transfers = counters.metric_data("TransferFromDeviceTime")
    return {
        "executions": counters.counter_value("ExecuteComputation") or 0,
        "transfers": 0 if transfers is None else transfers[0],
        "ours": base.metrics()["executions"],
    }


ONE = {"executions": 1, "transfers": 0, "ours": 1}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: syncfree.SGD(p, lr=0.1, momentum=0.9),
        lambda p: syncfree.AdamW(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: syncfree.wrap(torch.optim.RMSprop(p, lr=0.01)),
    ],
    ids=["syncfree.SGD", "syncfree.AdamW", "SGD", "Adam", "wrapped RMSprop"],
)
def test_one_program_and_no_transfer_per_step(make):
    assert train(GradScaler("xla"), make) == ONE


def test_what_the_stock_scaler_costs():
    stock = train(torch.amp.GradScaler("xla"), lambda p: torch.optim.SGD(p, lr=0.1))
    assert stock == {"executions": 2, "transfers": 1, "ours": 2}


def test_a_loop_that_never_syncs_runs_a_program_per_step():
    parameter = nn.Parameter(torch.ones(3).to("xla"))
    optimizer = syncfree.SGD([parameter], lr=0.1)
    torch_xla.sync(wait=True)
    before = base.metrics()["executions"]
    for _ in range(4):
        optimizer.zero_grad()
        with xla_amp.autocast("xla"):
            loss = (parameter * 2).sum()
        loss.backward()
        optimizer.step()
    torch_xla.sync()
    with xla_amp.autocast("xla"):  # the step has been ended: nothing more to run
        pass
    assert base.metrics()["executions"] - before == 4
