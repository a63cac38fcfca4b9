"""Sync-free optimizers against torch.optim in float64 on the CPU, and skips that leave every bit as it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from optimizer_runs import parameters, set_gradients
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from xla_amp import syncfree

STEPS = 6


def make(library, name, params, options):
    return getattr(library, name)(params, **{"lr": 0.05, **options})


def reference(name, options, steps=STEPS):
    """Parameters after torch.optim's steps in float64, one loop over parameters (no fused or foreach kernel)."""
    params = parameters("cpu", torch.float64)
    options = {key: value for key, value in options.items() if key != "capturable"}
    optimizer = make(torch.optim, name, params, {**options, "foreach": False})
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return params


def assert_close(params, expected, rtol=1e-5, atol=1e-6):
    for parameter, other in zip(params, expected, strict=True):
        found, wanted = (each.detach().cpu().double() for each in (parameter, other))
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def test_found_inf_is_added_to_the_scalers(device):
    for dtype in (torch.bool, torch.int64):
        params = parameters(device)
        optimizer = syncfree.Adam(params)
        set_gradients(params, 0)
        optimizer.found_inf = torch.zeros((), device=device)
        optimizer.step(found_inf=torch.tensor([1], dtype=dtype).to(device))
        assert_close(params, parameters("cpu"), rtol=0, atol=0)


def test_gradients_that_come_later(device):
    ours, theirs = parameters(device), parameters("cpu", torch.float64)
    options = {"lr": 0.05, "momentum": 0.9}
    pairs = [(ours, syncfree.SGD(ours, **options)), (theirs, torch.optim.SGD(theirs, **options))]
    for params, optimizer in pairs:
        for step in range(4):
            set_gradients(params, step)
            if step < 2:
                params[1].grad = None
            optimizer.step()
    assert_close(ours, theirs)


def test_parameters_of_two_dtypes(device):
    params = [*parameters(device), *parameters(device, torch.bfloat16)]
    optimizer = syncfree.AdamW(params, lr=0.05)
    for step in range(STEPS):
        set_gradients(params[:3], step)
        set_gradients(params[3:], step)
        optimizer.step()
    assert_close(params[:3], reference("AdamW", {}))
    assert_close(params[3:], reference("AdamW", {}), rtol=0.05, atol=0.05)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize(("name", "options"), [("SGD", {"momentum": 0.9}), ("AdamW", {}), ("Adagrad", {})])
def test_copies(device, name, options, duplicate):
    params = parameters(device)
    wrapped = name == "Adagrad"
    optimizer = make(torch.optim if wrapped else syncfree, name, params, options)
    optimizer = syncfree.wrap(optimizer) if wrapped else optimizer
    set_gradients(params, 0)
    optimizer.step()
    make(torch.optim, name, parameters(device), options).load_state_dict(optimizer.state_dict())
    other = duplicate(optimizer)
    assert type(other) is type(optimizer)
    others = other.param_groups[0]["params"]
    set_gradients(others, 1)
    other.step(found_inf=torch.ones((), device=device))
    for step in range(1, STEPS):
        set_gradients(others, step)
        other.step(found_inf=torch.zeros((), device=device))
    assert_close(others, reference(name, options))
    assert_close(params, reference(name, options, steps=1))


# ---- what else an optimizer does -------------------------------------------------------------------------------------


def test_closure_schedules_and_hooks(device):
    params, others = parameters(device), parameters("cpu", torch.float64)
    calls = []
    for params_, library in ((params, syncfree), (others, torch.optim)):
        optimizer = library.AdamW(params_, lr=0.05)
        schedule = ExponentialLR(optimizer, 0.7)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for step in range(STEPS):
            set_gradients(params_, step)
            assert optimizer.step(lambda: torch.is_grad_enabled()) is True
            schedule.step()
    assert_close(params, others)
    assert calls == ["before", "after"] * 2 * STEPS  # once per step, though the classes are nested


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_options_that_it_cannot_have(name):
    make, params = getattr(syncfree, name), parameters("cpu")
    for call, kind, words in (
        (lambda: make(params, fused=False), RuntimeError, rf"{name}\(fused=False\).*use torch.optim.{name}"),
        (lambda: make(params, differentiable=True), RuntimeError, rf"syncfree.{name}\(differentiable=True\)"),
        (lambda: make(params, lr=-1.0), ValueError, "Invalid learning rate"),
    ):
        with pytest.raises(kind, match=words):
            call()


def test_gradients_and_parameters_that_it_cannot_have():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"syncfree.SGD: a gradient is sparse \(parameter \(4, 2\)\)"):
        syncfree.SGD(embedding.parameters(), lr=0.1).step()
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=r"expected floating parameters, got torch\.complex64"):
        syncfree.Adam([parameter]).step()


# ---- any optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")  # the reference leaves a step out by hand
def test_wrap(device):
    params, expected = parameters(device), parameters("cpu", torch.float64)
    optimizer = syncfree.wrap(torch.optim.RMSprop(params, lr=0.01, momentum=0.9))
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert syncfree.wrap(optimizer) is optimizer
    schedule = ExponentialLR(optimizer, 0.9)
    plain = torch.optim.RMSprop(expected, lr=0.01, momentum=0.9, foreach=False)
    other = ExponentialLR(plain, 0.9)
    one = torch.ones((), device=device)
    for step in range(STEPS):
        bad = step in (0, 2)
        set_gradients(params, step, factor=float("inf") if bad else 1.0)
        assert optimizer.step(lambda: 3, found_inf=one * bad) == 3
        schedule.step()
        if not bad:
            set_gradients(expected, step)
            plain.step()
        other.step()
    assert_close(params, expected)


def test_wrap_refuses():
    with pytest.raises(TypeError, match=r"expects a torch.optim.Optimizer, got 3 \(int\)"):
        syncfree.wrap(3)
    optimizer = torch.optim.RMSprop(parameters("cpu"))
    ExponentialLR(optimizer, 0.9)
    with pytest.raises(ValueError, match="wrap the optimizer first"):
        syncfree.wrap(optimizer)
