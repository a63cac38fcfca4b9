"""Every optimizer of torch.optim: one executable a step, nothing read back, and the steps and checkpoints of torch."""

from __future__ import annotations

import copy
import inspect
import io
import warnings

import pytest
import torch
from optimizer_runs import OPTIONS
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree
from xla_amp.testing import counts as counted

NOT_HERE = {"LBFGS": "its step needs a closure, which scalers refuse, and decides on the host how often to call it"}
BAD = (0, 7)
STEPS = 20


def networks(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2, bias=False))
    return model.to(device), torch.randn(8, 4).to(device), torch.randn(8, 2).to(device)


def looked_up(device):
    """A model whose gradients are sparse."""
    torch.manual_seed(0)
    model, x = nn.Embedding(9, 2, sparse=True), torch.tensor([1, 4, 4, 0, 8, 1, 4, 7])
    return model.to(device), x.to(device), torch.randn(8, 2).to(device)


def train(device, optimizer_of, scaler, steps=STEPS, each=xla_amp.sync, model_of=networks):
    model, x, y = model_of(device)
    optimizer = optimizer_of(model.parameters())
    poison = [torch.tensor(float("inf") if step in BAD else 1.0).to(device) for step in range(steps)]
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y) * poison[step]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        each()
    return model, optimizer


def test_none_is_forgotten():
    classes = [c for c in vars(torch.optim).values() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)]
    assert {c.__name__ for c in classes} - {"Optimizer"} == {*OPTIONS, *NOT_HERE}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's SparseAdam, once a process
@pytest.mark.parametrize("name", OPTIONS)
def test_twenty_steps_with_two_overflows(name):
    make = getattr(torch.optim, name)
    options = {"lr": 0.01, **OPTIONS[name]}
    model_of = looked_up if name == "SparseAdam" else networks
    spent = []

    def sync():
        with counted() as counts:
            xla_amp.sync()
        spent.append(counts.executions)

    with warnings.catch_warnings(), counted() as counts:
        warnings.simplefilter("error")
        scaler = GradScaler(growth_interval=4)
        wrapped = lambda p: syncfree.wrap(make(p, **options))  # noqa: E731
        model, _ = train(xla_amp.xla_device(), wrapped, scaler, each=sync, model_of=model_of)
    assert (counts.host_syncs, counts.device_to_host, counts.fallbacks) == (0, 0, 0)
    assert spent == [1] * STEPS
    assert counts.compilations <= 4  # uploads and the state's beginning are other programs
    assert int(scaler.skipped_steps()) == len(BAD)

    expected, _ = train(
        "cpu", lambda p: make(p, **options), torch.amp.GradScaler("cpu", growth_interval=4), model_of=model_of
    )
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        # Muon orthogonalizes in bfloat16.
        atol = 2e-3 if name == "Muon" else 2e-5
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=atol)


PROGRAMS = {"ASGD": 2, "Adagrad": 2, "Rprop": 2}
"""Optimizers whose state does not begin with zeros: their first step is another program."""


@pytest.mark.parametrize(
    ("name", "closure"),
    [*((name, False) for name in OPTIONS if name != "SparseAdam"), ("AdamW", True), ("SGD", True), ("Adafactor", True)],
)
def test_the_first_step_is_the_program_of_the_next_ones(name, closure):
    rows = 2 + 2 * [*OPTIONS].index(name) + closure  # of no other test, whose programs exist

    def train(device):
        model, x, y = networks(device)
        x, y = (part.cpu()[:1].repeat(rows, 1).to(device) for part in (x, y))
        options = {"lr": 0.01, **OPTIONS[name]}
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)

        def loss():
            found = nn.functional.mse_loss(model(x), y)
            found.backward()
            return found

        for _ in range(4):
            optimizer.zero_grad()
            if closure:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
            if device != "cpu":
                xla_amp.sync()
        return model, optimizer

    xla_amp.sync(wait=True)
    xla_amp.metrics.reset()
    model, optimizer = train(xla_amp.xla_device())
    assert xla_amp.metrics()["compilations"] == PROGRAMS.get(name, 1)
    expected, theirs = train("cpu")
    states = [list(made.state_dict()["state"].values()) for made in (optimizer, theirs)]
    assert [list(state) for state in states[0]] == [list(state) for state in states[1]]
    torch.testing.assert_close([p.cpu() for p in model.parameters()], list(expected.parameters()), atol=1e-5, rtol=1e-4)


def test_a_parameter_without_a_gradient_gets_no_state():
    model, x, y = networks(xla_amp.xla_device())
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    assert list(optimizer.state) == [model[0].weight]


SAVED = {
    **{name: (torch.optim, name, options) for name, options in OPTIONS.items() if name != "SparseAdam"},
    "Adam in a loop": (torch.optim, "Adam", {"foreach": False, "amsgrad": True}),
    "AdamW with a tensor": (torch.optim, "AdamW", {"lr": torch.tensor(0.01), "foreach": False}),
    "AdamW, fused": (torch.optim, "AdamW", {"fused": True}),
    "SGD, dampened": (torch.optim, "SGD", {"momentum": 0.9, "dampening": 0.5}),
    "syncfree.SGD": (syncfree, "SGD", {"momentum": 0.9}),
    "syncfree.Adam": (syncfree, "Adam", {"amsgrad": True}),
    "syncfree.AdamW": (syncfree, "AdamW", {}),
}
"""Name -> library, class and options; those of torch.optim take over on the CPU."""
PLACES = [
    *(("xla", "xla", "xla"), ("xla", "xla", "cpu"), ("cpu", "xla", "cpu"), ("xla", "cpu", "cpu")),
    *(("xla", "cpu", None), ("cpu", "xla", None)),
]
"""Where the first steps are, where the next ones, and the ``map_location`` of a file between them, if there is one."""


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_goes_on(name, places):
    """With the weights of an uninterrupted run, its state where a fresh optimizer has it, and without waiting."""
    devices = {"cpu": torch.device("cpu"), "xla": xla_amp.xla_device()}
    (source, target), between = (devices[place] for place in places[:2]), places[2]

    def made(device):
        model, *batch = networks(device)
        library, class_name, options = SAVED[name]
        library = torch.optim if device.type == "cpu" else library
        return model, getattr(library, class_name)(model.parameters(), **{"lr": 0.01, **options}), *batch

    def run(model, optimizer, x, y):
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            xla_amp.sync()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    first, second, exact = made(source), made(target), made(devices["cpu"])
    for each in (first, exact):
        run(*each)
    states = [part.state_dict() for part in first[:2]]
    if between is not None:
        file = io.BytesIO()
        torch.save(states, file)
        file.seek(0)
        states = torch.load(file, map_location=devices[between])
    for part, state in zip(second, states, strict=False):
        part.load_state_dict(state)
    xla_amp.sync()
    with counted() as counts:
        found = run(*second)
    waits = len(found) if target.type != "cpu" else 0  # of reading the weights
    assert counts.host_syncs <= waits
    tolerances = {"atol": 2e-3 if name == "Muon" else 1e-5, "rtol": 1e-4}  # Muon orthogonalizes in bfloat16
    torch.testing.assert_close(found, run(*exact), **tolerances)
    if target.type == "cpu":
        kept = [value for state in second[1].state.values() for value in state.values()]
        assert {value.device.type for value in kept if isinstance(value, torch.Tensor)} == {"cpu"}
    if source == target:
        if name != "Muon":  # which orthogonalizes rounding errors
            assert all(torch.equal(a, b) for a, b in zip(run(*first), found, strict=True))
        kept = [
            [(key, v.device) for state in optimizer.state.values() for key, v in state.items() if v is not None]
            for optimizer in (first[1], second[1])
        ]
        assert kept[0] == kept[1]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_checkpoints_of_sparse_adam_go_both_ways():
    """torch counts in Python there and we on the device, also when the first step after loading is skipped."""
    model, _, _ = looked_up("cpu")
    _, theirs = train("cpu", lambda p: torch.optim.SparseAdam(p, lr=0.01), plain("cpu"), steps=4, model_of=looked_up)

    def resumed(parameters):
        optimizer = torch.optim.SparseAdam(parameters)
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
        return optimizer

    def counts(optimizer):
        return [float(state["step"]) for state in optimizer.state.values()]

    assert counts(theirs) == [3.0]  # the first was skipped
    expected, other = train("cpu", resumed, plain("cpu"), steps=3, model_of=looked_up)
    found, ours = train(xla_amp.xla_device(), resumed, GradScaler(), steps=3, model_of=looked_up)
    assert counts(ours) == counts(other) == [5.0]
    torch.testing.assert_close(found.weight.detach().cpu(), expected.weight.detach(), rtol=1e-5, atol=1e-6)

    back = torch.optim.SparseAdam(model.parameters())
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    back.load_state_dict(torch.load(file, map_location="cpu"))
    nn.functional.mse_loss(model(torch.tensor([1, 2])), torch.zeros(2, 2)).backward()
    back.step()
    assert counts(back) == [6.0]


def plain(device):
    return torch.amp.GradScaler(device)


def test_hooks_run_once_where_the_step_is_ours():
    calls = []

    def make(params):
        optimizer = syncfree.wrap(torch.optim.Adafactor(params))
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        return optimizer

    train(xla_amp.xla_device(), make, GradScaler(), steps=2)
    assert calls == ["before", "after"] * 2


def test_lbfgs(recwarn):
    device = xla_amp.xla_device()
    model, x, y = networks(device)
    optimizer = syncfree.wrap(torch.optim.LBFGS(model.parameters(), max_iter=2))
    before = [parameter.tolist() for parameter in model.parameters()]

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure, found_inf=torch.ones((), device=device))
    assert [parameter.tolist() for parameter in model.parameters()] == before
    first = optimizer.step(closure, found_inf=torch.zeros((), device=device))
    assert closure() < first
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        GradScaler().step(optimizer, closure)
