"""GradScaler: torch's contract on the CPU and on the lazy device, where nothing may wait for the device."""

from __future__ import annotations

import collections
import pickle
import warnings

import optimizer_runs
import pytest
import torch
from optimizer_runs import parameters
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree
from xla_amp.errors import SkipLimitError
from xla_amp.testing import counts as counted

INF = float("inf")


def set_gradients(params, scaler, step, bad=False):
    """What a backward pass of a scaled loss leaves: gradients times the scale, one of each inf if `bad`."""
    optimizer_runs.set_gradients(params, step, bad=bad)
    scale = scaler.scale(torch.ones((), device=params[0].device))
    for parameter in params:
        parameter.grad *= scale.to(parameter.dtype)


def train(scaler, optimizer, params, bad=(), steps=8):
    scales = []
    for step in range(steps):
        set_gradients(params, scaler, step, bad=step in bad)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


# ---- any optimizer ---------------------------------------------------------------------------------------------------


WITHOUT_A_READ = [
    (GradScaler, syncfree, "SGD", {"momentum": 0.9}),
    (GradScaler, syncfree, "AdamW", {}),
    (GradScaler, torch.optim, "Adam", {"amsgrad": True, "foreach": False}),
    (GradScaler, torch.optim, "Adam", {"fused": True}),
    (GradScaler, torch.optim, "SGD", {"momentum": 0.9, "fused": True}),
    (torch.amp.GradScaler, torch.optim, "Adam", {}),
    (torch.amp.GradScaler, syncfree, "AdamW", {"amsgrad": True}),
]
"""test_all_optimizers.py has each of torch's classes."""


@pytest.mark.parametrize(("kind", "library", "name", "options"), WITHOUT_A_READ, ids=lambda value: str(value)[:40])
def test_nothing_waits_for_the_device(kind, library, name, options):
    device = xla_amp.xla_device()
    params = parameters(device)
    optimizer = getattr(library, name)(params, lr=0.05, **options)
    scaler = kind(device.type, growth_interval=2)
    xla_amp.sync()
    with warnings.catch_warnings(), counted() as counts:
        warnings.simplefilter("error")
        for step in range(6):
            set_gradients(params, scaler, step, bad=step in (0, 3))
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
            xla_amp.sync()
    assert (counts.host_syncs, counts.device_to_host, counts.fallbacks, counts.executions) == (0, 0, 0, 6)


def test_options_are_put_back():
    params = parameters(xla_amp.xla_device())
    optimizer = torch.optim.Adam(params, lr=0.05)
    scaler = GradScaler()
    train(scaler, optimizer, params, steps=2)
    assert optimizer.param_groups[0]["capturable"] is False
    assert optimizer.state[params[0]]["step"].device == params[0].device
    other = parameters("cpu")
    torch.optim.Adam(other).load_state_dict(optimizer.state_dict())  # as where counting on the device is not allowed


# ---- bounds and the limit on skips -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "kind", "message"),
    [
        ({"device": 1024.0}, ValueError, r"GradScaler\(1024.0\): expected a device"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, "expected 0 < min_scale <= max_scale"),
        ({"min_scale": -1.0}, ValueError, "expected 0 < min_scale <= max_scale"),
        ({"max_scale": 2.0}, ValueError, "the first scale is out of the bounds"),
        ({"max_consecutive_skips": 0}, ValueError, "expected a positive number of steps"),
        ({"max_consecutive_skips": 2.5}, ValueError, "expected a positive number of steps"),
        ({"use_zero_grad": True}, ValueError, "torch_xla then steps by gradients of zero; leave it out"),
        ({"growth_factor": 1.0}, AssertionError, "> 1.0"),
        ({"backoff_factor": 1.0}, AssertionError, "< 1.0"),
    ],
)
def test_arguments_that_cannot_be(kwargs, kind, message):
    with pytest.raises(kind, match=message):
        GradScaler(**{"device": "cpu", **kwargs})


@pytest.mark.parametrize("clean", [0, 1, 4])
def test_too_many_skips_in_a_row(device, clean):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(device)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05)
    scaler = GradScaler(device, max_consecutive_skips=3)

    def step(bad):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2, device=device)).sum()).backward()
        if bad:
            model[0].weight.grad.fill_(INF)
            model[1].bias.grad.fill_(float("nan"))
        scaler.step(optimizer)
        scaler.update()

    for bad in [*[False] * clean, True, True, False, True, True]:
        step(bad)
    assert int(scaler.consecutive_skips()) == 2
    with pytest.raises(SkipLimitError, match=r"3 steps in a row were skipped.*find_overflow") as caught:
        step(True)
    assert caught.value.skips == 3
    assert scaler.get_scale() == 2.0**16 / 2**5  # update() had done its work
    assert int(scaler.consecutive_skips()) == 0  # the count restarts
    assert bool(scaler.step_was_skipped())
    for bad in [True, True, False]:
        step(bad)
    assert int(scaler.skipped_steps()) == 7


def test_the_limit_reads_one_number_in_as_many_steps():
    device = xla_amp.xla_device()
    params = parameters(device)
    optimizer = torch.optim.SGD(params, lr=0.05)
    scaler = GradScaler(max_consecutive_skips=5)
    set_gradients(params, scaler, 0)
    with counted() as counts:
        for _ in range(20):
            scaler.step(optimizer)
            scaler.update()
    assert counts.host_syncs == 4


# ---- torch's contract ------------------------------------------------------------------------------------------------


def started(device, **kwargs):
    params = parameters(device)
    optimizer = torch.optim.SGD(params, lr=0.05)
    scaler = GradScaler(device, **kwargs)
    set_gradients(params, scaler, 0)
    return scaler, optimizer, params


def test_positional_order():
    ours, theirs = (cls("cpu", 4.0, 3.0, 0.25, 7, True) for cls in (GradScaler, torch.amp.GradScaler))
    assert ours.state_dict() == theirs.state_dict()
    assert ours.state_dict()["growth_factor"] == 3.0


@pytest.mark.parametrize("given", ["xla", "jax:0", torch.device("xla"), None])
def test_devices(given):
    xla_amp.xla_device()
    scaler = GradScaler() if given is None else GradScaler(given)
    scaled = scaler.scale(torch.ones((), device="jax"))
    assert (scaled.device.type, scaled.dtype) == ("jax", torch.float32)


def test_scale_of_containers(device):
    Pair = collections.namedtuple("Pair", ["a", "b"])
    scaler = GradScaler(device, init_scale=4.0)
    one = torch.ones(2, device=device)
    assert scaler.scale(one).tolist() == [4.0, 4.0]
    pair, extra = scaler.scale((Pair(one, [one]), {"x": one}))
    assert isinstance(pair, Pair)
    assert [pair.a.tolist(), pair.b[0].tolist(), extra["x"].tolist()] == [[4.0, 4.0]] * 3
    assert [tensor.tolist() for tensor in scaler.scale(iter([one]))] == [[4.0, 4.0]]
    assert scaler.scale(one.to(torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("outputs", [3, None, "loss", [1], {"x": "y"}])
def test_scale_refuses(outputs):
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors, got"):
        GradScaler("cpu").scale(outputs)


def test_questions_before_and_after_an_iteration(device):
    scaler, optimizer, _ = started(device)
    with pytest.raises(RuntimeError, match="no iteration has ended yet"):
        scaler.step_was_skipped()
    assert int(scaler.skipped_steps()) == 0
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration"):
        pickle.dumps(scaler)
    with pytest.raises(AssertionError, match="new_scale should be a float or a 1-element"):
        scaler.update(torch.ones(2, device=device))
    assert scaler.skipped_steps().dtype is torch.int32


def test_disabled(device):
    params = parameters(device)
    optimizer = torch.optim.SGD(params, lr=0.05)
    scaler = GradScaler(device, enabled=False)
    loss = torch.ones((), device=device)
    assert scaler.scale(loss) is loss
    assert scaler.scale("anything") == "anything"
    set_gradients(params, GradScaler(device), 0)
    before = [parameter.tolist() for parameter in params]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert [parameter.tolist() for parameter in params] != before
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    assert not scaler.is_enabled()
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == {}
