"""What a captured step compares at each call, and what is a constant: docs/compile.md's table, a row each.

A change of what is compared counts in the next call; of a constant it does not, and the next comparison finds it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import os
import sys
import threading
import types
from typing import Any

import calls
import numpy as np
import pytest
import torch
from harness import replaying
from torch import nn

import xla_amp
from xla_amp.errors import CaptureError

settings: Any = types.SimpleNamespace()
CFG: dict[str, Any] = {}
SCALE = 2.0


class Mode(enum.Enum):
    DOUBLE = 2
    TRIPLE = 3


class Class:
    factor = 2.0


@dataclasses.dataclass(eq=False)
class Trainer:
    """A bound object: its plain values are compared if the step's code names them, its tensors are inputs."""

    factor: Any = 2.0
    weight: Any = None

    def step(self, x):
        return x * self.factor

    def read(self, x):
        return x * self.weight


def test_a_captured_method_has_the_counts_of_its_step(device):
    class Doubles:
        @xla_amp.compile
        def step(self, x):
            return x * 2

    doubles, x = Doubles(), torch.ones(2, device=device)
    assert [doubles.step(x).sum().item() for _ in range(4)] == [4.0] * 4
    assert doubles.step.replays == Doubles.step.replays == 2
    doubles.step.reset()
    assert (doubles.step.replays, doubles.step.reasons) == (0, [])
    report = xla_amp.find_overflow(doubles.step, torch.full((2,), 3e38, device=device))
    assert "mul" in str(report)


@pytest.fixture
def x(device):
    settings.__dict__.update(ALPHA=2.0, T={"k": [2.0]}, mode=Mode.DOUBLE, weights=None)
    CFG.update(alpha=2.0, inner={"beta": (1.0, 2.0)})
    Class.factor = 2.0
    return torch.ones(2, device=device)


def scaled(value):
    """A module that multiplies by an attribute."""
    module = nn.Module()
    module.factor = value
    module.forward = lambda x: x * module.factor
    return module


def cell(value):
    """(step, function that sets the value that it closes over)."""

    def step(x):
        return x * value

    def change(new):
        nonlocal value
        value = new

    return step, change


def _set(holder, key):
    return lambda value: (
        holder.__setitem__(key, value) if isinstance(holder, dict | list) else setattr(holder, key, value)
    )


def compared(device):
    """Name -> (step that multiplies by 2, function that sets that number)."""
    module, trainer, items, event = scaled(2.0), Trainer(), [2.0], {2.0}
    buffer, parameter = nn.Module(), nn.Module()
    buffer.register_buffer("b", torch.tensor([2.0]))
    parameter.p = nn.Parameter(torch.tensor(2.0), requires_grad=False)
    weight = nn.Module()
    weight.register_buffer("w", torch.full((2,), 2.0, device=device))
    bound = Trainer(weight=torch.full((2,), 2.0, device=device))
    array = np.full(1, 2.0)
    schedule = types.SimpleNamespace(last_epoch=2)
    tensors = [torch.full((2,), 2.0, device=device)]
    partial = functools.partial(lambda x, factor: x * factor, factor=2.0)
    hides, hidden, parts = Class(), Class(), [[1.0, 2.0], [3.0]]
    hidden.factor = 2.0
    return {
        "a closure": cell(2.0),
        "a list": (lambda x: x * items[0], _set(items, 0)),
        "a set": (lambda x: x * max(event), lambda value: event.add(value)),
        "a global": (lambda x: x * SCALE, lambda value: globals().__setitem__("SCALE", value)),
        "a dict": (lambda x: x * CFG["alpha"], _set(CFG, "alpha")),
        "nested containers": (
            lambda x: x * CFG["inner"]["beta"][1],
            lambda value: CFG["inner"].__setitem__("beta", (1.0, value)),
        ),
        "an attribute": (lambda x: x * settings.ALPHA, _set(settings, "ALPHA")),
        "a container in an attribute": (lambda x: x * settings.T["k"][0], lambda v: settings.T["k"].__setitem__(0, v)),
        "an enum": (lambda x: x * settings.mode.value, lambda value: setattr(settings, "mode", Mode(value))),
        "a class": (lambda x: x * Class.factor, _set(Class, "factor")),
        "an attribute that comes": (lambda x: x * hides.factor, _set(hides, "factor")),  # and hides its class's
        "an attribute that goes": (
            lambda x: x * hidden.factor, lambda value: (delattr(hidden, "factor"), _set(Class, "factor")(value))
        ),
        "a partial's keyword": (partial, _set(partial.keywords, "factor")),
        "an item that moves between lists": (
            lambda x: x * len(parts[0]), lambda value: parts[0].append(parts[1].pop())
        ),
        "self": (trainer.step, _set(trainer, "factor")),
        "an object's epoch": (lambda x: x * schedule.last_epoch, _set(schedule, "last_epoch")),
        "a module's attribute": (lambda x: module(x), _set(module, "factor")),
        "a function": (lambda x: settings.weights(x) if settings.weights else x * 2, lambda _: setattr(
            settings, "weights", functools.partial(torch.mul, other=3)
        )),
        "an array": (lambda x: x * float(array[0]), lambda value: array.fill(value)),
        "a buffer on the host": (lambda x: x * buffer.b.item(), lambda value: buffer.b.fill_(value)),
        "a parameter on the host": (lambda x: x * parameter.p.item(), lambda value: parameter.p.data.fill_(value)),
        "a tensor of a module": (
            lambda x: x * weight.w, lambda value: setattr(weight, "w", torch.full((2,), float(value), device=device))
        ),
        "a tensor of self": (
            bound.read, lambda value: setattr(bound, "weight", torch.full((2,), float(value), device=device))
        ),
        "a tensor in a list": (
            lambda x: x * tensors[0], lambda value: _set(tensors, 0)(torch.full((2,), float(value), device=device))
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", compared("cpu"))
def test_a_change_of_what_is_compared_counts(name, device, x):
    function, change = compared(device)[name]
    step = xla_amp.compile(function, strict=True)
    assert [step(x).tolist() for _ in range(5)] == [[2.0, 2.0]] * 5
    change(3)
    assert [step(x).tolist() for _ in range(5)] == [[3.0, 3.0]] * 5
    assert step.replays >= 6
    globals()["SCALE"] = 2.0


@pytest.mark.parametrize(("one", "other"), [(2, 2.0), (1, True), (0.0, -0.0), ("a", b"a"), ((1,), [1])])
def test_values_of_another_type_are_another_capture(one, other, x):
    named = xla_amp.compile(lambda x, value: x + len(repr(value)), strict=True)
    for value in (one, one, one, other, one):
        assert named(x, value).tolist() == [1.0 + len(repr(value))] * 2
    assert len(named._own.cache) == 2


def outer(value):
    """A step that reads `value` by a helper's closure, which is not the step's own code."""
    held = {"value": value}

    def helper(x):
        return x * held["value"]

    return lambda x: helper(x), lambda new: held.__setitem__("value", new)


def constants():
    """Name -> (step, function that changes what it reads): rows of the table, each with its remedy there."""
    event, two_deep = threading.Event(), types.SimpleNamespace(inner=types.SimpleNamespace(factor=2.0))
    hidden, many = {"XLA_AMP_TEST_FACTOR": "2"}, [2.0] * 1001
    os.environ.update(hidden)
    return {
        "another function's closure": outer(2.0),
        "two attributes deep": (lambda x: x * two_deep.inner.factor, _set(two_deep.inner, "factor")),
        "a method of an object": (lambda x: x * (3.0 if event.is_set() else 2.0), lambda _: event.set()),
        "the environment": (
            lambda x: x * float(os.environ["XLA_AMP_TEST_FACTOR"]),
            lambda value: os.environ.__setitem__("XLA_AMP_TEST_FACTOR", str(value)),
        ),
        "a large container": (lambda x: x * many[0], _set(many, 0)),
        "the interpreter": (lambda x: x * sys.getrecursionlimit(), lambda _: sys.setrecursionlimit(1234)),
    }


@pytest.mark.parametrize("name", constants())
def test_a_change_of_a_constant_is_found_by_the_comparison(name, x):
    limit = sys.getrecursionlimit()
    try:
        function, change = constants()[name]
        step = xla_amp.compile(function)
        before = [step(x).tolist() for _ in range(4)][-1]
        change(3)
        assert step(x).tolist() == before
        with pytest.raises(CaptureError, match=r"no longer does what was captured.*(Python computes|calls differ)"):
            [step(x) for _ in range(40)]
        assert step.replays == 8
    finally:
        sys.setrecursionlimit(limit)


class Loss:
    """An object whose method a step calls through others."""

    def __init__(self):
        self.owner, self.inner, self.module = self, types.SimpleNamespace(factor=2.0), nn.Module()
        self.module.config = types.SimpleNamespace(owner=self, beta=2.0)

    @property
    def gamma(self):
        return self.inner.factor

    @property
    def broken(self):
        raise RuntimeError

    def deep(self, model, x):
        return x * self.owner.inner.factor if model else self.broken

    def computed(self, model, x):
        return x * self.gamma

    def configured(self, model, x):
        return x * model.config.beta

    def attribute(self, model, x):
        return x * self.module.config.owner.inner.factor


@pytest.mark.parametrize("name", ["deep", "computed", "configured", "attribute"])
def test_a_function_of_the_state_is_searched(name, x):
    loss = Loss()
    hidden = {"call": getattr(loss, name)}.__getitem__

    def step(model, x):
        return hidden("call")(model, x)

    compiled = xla_amp.compile(step, strict=True, state=[getattr(loss, name)])
    for value in (2.0, 3.0):
        loss.inner.factor = loss.module.config.beta = value
        assert [compiled(loss.module, x).tolist() for _ in range(5)] == [[value] * 2] * 5
    assert compiled.replays == 6


def test_a_function_of_the_state_may_have_a_closure(x):
    function, change = outer(2.0)
    step = xla_amp.compile(function, strict=True, state=[inspect.getclosurevars(function).nonlocals["helper"]])
    assert [step(x).tolist() for _ in range(4)] == [[2.0] * 2] * 4
    change(3)
    assert [step(x).tolist() for _ in range(4)] == [[3.0] * 2] * 4


def test_check_compares_each_call(x):
    function, change = outer(2.0)
    step = xla_amp.compile(function, check=True)
    assert [step(x).tolist() for _ in range(5)] == [[2.0, 2.0]] * 5
    change(3.0)
    with pytest.raises(CaptureError, match=r"no longer does what was captured.*Python computes 3\.0 for mul"):
        step(x)
    assert step.replays == 0


# ---- hooks, gradients, helpers ---------------------------------------------------------------------------------------


def doubled(module, args, output=None):
    return output * 2 if output is not None else None


def _halve(parameter):
    parameter.grad.mul_(0.5)


HOOKS = {
    "of a module": lambda m, o: m.register_forward_hook(doubled),
    "before a module": lambda m, o: m.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "of a module's gradient": lambda m, o: m.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,)),
    "of a parameter": lambda m, o: m.weight.register_hook(lambda gradient: gradient * 0.5),
    "after a gradient": lambda m, o: m.weight.register_post_accumulate_grad_hook(_halve),
    "before an optimizer": lambda m, o: o.register_step_pre_hook(lambda *_: _halve(m.weight)),
    "after an optimizer": lambda m, o: o.register_step_post_hook(lambda *_: _halve(m.bias)),
    "a frozen parameter": lambda m, o: m.bias.requires_grad_(False),
    "evaluation": lambda m, o: m.eval(),
    "another class": lambda m, o: setattr(m, "__class__", type("Other", (nn.Linear,), {})),
    "a parameter that goes": lambda m, o: setattr(m, "bias", None),
    "an option": lambda m, o: o.param_groups[0].update(maximize=True),
    "a number that becomes zero": lambda m, o: o.param_groups[0].update(lr=0.0),
    "a number that was zero": lambda m, o: o.param_groups[0].update(momentum=0.5),
}


class _Optional(nn.Module):
    """Multiplies by what an inner module has, if it has it."""

    def __init__(self, device):
        super().__init__()
        self.inner = nn.ModuleDict()
        self.inner.deleted = 5.0
        self.inner.weight = nn.Parameter(torch.full((), 7.0, device=device), requires_grad=False)

    def forward(self, x):
        for name in ("added", "deleted", "weight", "other", "mean"):
            x = x * getattr(self.inner, name, 1.0)
        return x * (1 + len(self.inner))


CHANGED = {
    "an attribute is added": (lambda m, d: setattr(m, "added", 3.0), 105.0),
    "an attribute is deleted": (lambda m, d: delattr(m, "deleted"), 7.0),
    "a parameter has another name": (lambda m, d: (setattr(m, "other", m.weight), delattr(m, "weight")), 35.0),
    "a parameter is deleted": (lambda m, d: delattr(m, "weight"), 5.0),
    "a buffer is added": (lambda m, d: m.register_buffer("mean", torch.full((), 3.0, device=d)), 105.0),
    "a module is added": (lambda m, d: m.update({"a": nn.Identity()}), 70.0),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_an_inner_module_gains_or_loses_counts(name, device):
    model, x = _Optional(device), torch.ones(2, device=device)
    step = xla_amp.compile(lambda x: model(x), strict=True)
    assert [step(x)[0].item() for _ in range(4)] == [35.0] * 4
    change, expected = CHANGED[name]
    change(model.inner, device)
    assert [step(x)[0].item() for _ in range(4)] == [expected] * 4
    assert step.replays == 4


def _training(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", HOOKS)
def test_a_change_of_the_state_counts(name, device):
    def train(wrap):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(device)
        optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.1)

        call, losses, handle = wrap(_training(model, optimizer)), [], None
        for number in range(16):
            if number == 11:
                handle = HOOKS[name](model, optimizer)
            if number == 14 and hasattr(handle, "remove"):
                handle.remove()
            losses.append(call(torch.ones(3, 4, device=device)).detach())
        return [each.item() for each in losses], [each.tolist() for each in model.parameters()], call

    losses, weights, step = train(lambda step: xla_amp.compile(step, strict=True))
    assert (losses, weights) == train(lambda step: step)[:2]
    assert step.replays >= 8  # after which the next call would be compared: it begins another capture instead


def test_a_model_that_only_a_helper_names_is_state_once_it_was_called(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(device)

    def helper(x):
        return model(model[:1](x))  # of which the second one is another module in each call

    step = xla_amp.compile(lambda x: helper(x).detach(), strict=True)
    x = torch.ones(64, 4, device=device)
    for _ in range(5):
        step(x)
    model.eval()
    assert torch.equal(step(x), helper(x))
    assert step.replays == 2


def test_the_mode_of_gradients_is_compared(device):
    weight, x = torch.ones(3, device=device, requires_grad=True), torch.arange(3.0).to(device)
    captured = xla_amp.compile(lambda x: (x * weight).sum())
    with torch.no_grad():
        assert not any(captured(x).requires_grad for _ in range(5))
    assert captured.replays > 0
    captured(x).backward()
    assert weight.grad.tolist() == [0.0, 1.0, 2.0]


def test_a_replay_runs_few_functions_of_the_package(device):
    model, x = nn.Linear(4, 3).to(device), torch.ones(5, 4, device=device)
    step = replaying(_training(model, xla_amp.syncfree.SGD(model.parameters(), lr=0.1)), x)
    ours = calls.of(lambda: step(x))
    assert 50 < len(ours) < 150, collections.Counter(ours).most_common()
