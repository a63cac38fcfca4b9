"""Optimizers of every form: a skipped step leaves what torch leaves, which does not call it."""

from __future__ import annotations

import collections
import warnings

import pytest
import torch

import xla_amp
from xla_amp.testing import counts as counted
from xla_amp.training import reader


class Plain(torch.optim.Optimizer):
    """Base of the optimizers below; one group, no options."""

    def __init__(self, params):
        super().__init__(params, {})
        self.params = self.param_groups[0]["params"]


class DecayAll(Plain):
    """Also changes parameters without a gradient, and has no state."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.params:
            p.mul_(0.5)
            if p.grad is not None:
                p.sub_(p.grad)


class Around(torch.optim.Optimizer):
    """Steps an inner optimizer, whose state is not its own; torch's constructor was not called."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = collections.defaultdict(dict)
        self.slow = [p.detach().clone() for p in inner.param_groups[0]["params"]]
        self._optimizer_step_pre_hooks = collections.OrderedDict()
        self._optimizer_step_post_hooks = collections.OrderedDict()

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            slow.lerp_(p, 0.5)
            p.copy_(slow)


class WithoutHooks(torch.optim.Optimizer):
    """Has no hooks, because neither torch's constructor nor its `zero_grad` was called; as Accelerate's."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        self.inner.step()


class Lookahead(Around):
    """Averages in each second step, which it counts in Python."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        if self.count % 2:
            self.inner.step()
        else:
            super().step()


class Centralized(torch.optim.SGD):
    """Replaces gradients, then takes torch's step."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad = p.grad - p.grad.mean()
        return super().step(closure)


class Named(Plain):
    """State that has a name, with a count on the host; moments in an attribute."""

    def __init__(self, params):
        super().__init__(params)
        self.moments = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self, closure=None):
        self.state.setdefault("k", torch.zeros(1))
        self.state["k"] += 1
        for p, moment in zip(self.params, self.moments, strict=True):
            if p.grad is not None:
                moment.mul_(0.9).add_(p.grad)
                p.sub_(0.1 * moment / self.state["k"].item())


class Binding(Named):
    """Binds new tensors: moments in a new list, parameters by ``.data``."""

    @torch.no_grad()
    def step(self, closure=None):
        self.moments = [
            m * 0.9 + (0 if p.grad is None else p.grad) for m, p in zip(self.moments, self.params, strict=True)
        ]
        for p, moment in zip(self.params, self.moments, strict=True):
            p.data = p.data - 0.1 * moment


class Library:
    """An object with state."""

    def __init__(self):
        self.count, self.moments = 0, {}


class WithObject(Plain):
    """Its state is in an object of another class, and begins in the first step."""

    def __init__(self, params):
        super().__init__(params)
        self.library = Library()

    @torch.no_grad()
    def step(self, closure=None):
        self.library.count += 1
        for p in self.params:
            if p.grad is not None:
                moment = self.library.moments.setdefault(p, torch.zeros_like(p))
                moment.mul_(0.5).add_(p.grad)
                p.sub_(0.1 * moment / self.library.count)


class Checking(Plain):
    """Reads gradients on the host, and raises where they are not finite."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.params:
            if p.grad is not None:
                if not p.grad.isfinite().all():
                    raise ValueError("a gradient is not finite")
                p.sub_(0.1 * p.grad)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.Adam(params, lr=0.1)


FORMS = {
    "decays all": (DecayAll, True),
    "around SGD": (lambda p: Around(sgd(p)), True),
    "around Adam": (lambda p: Around(adam(p)), True),
    "around one around syncfree": (lambda p: Around(Around(xla_amp.syncfree.AdamW(p, lr=0.1))), True),
    "without hooks": (lambda p: WithoutHooks(torch.optim.Adam(p)), True),
    "Lookahead": (lambda p: Lookahead(sgd(p)), False),
    "centralized": (lambda p: Centralized(p, lr=0.1, momentum=0.9), True),
    "named": (Named, False),
    "binding": (Binding, True),
    "with an object": (WithObject, False),
    "checking": (Checking, False),
    "in wrap": (lambda p: xla_amp.syncfree.wrap(Around(sgd(p))), True),
}
"""Name -> optimizer of parameters, and whether the device decides on its steps."""
FACTORS = [float("inf"), 1.0, 2.0, float("nan"), float("inf"), 3.0, float("inf"), 1.0]


def values(optimizer):
    """Each number and tensor that an optimizer holds, by its path; parameters by their number."""
    numbers = {p: n for n, p in enumerate(optimizer.param_groups[0]["params"])}
    return {
        tuple(numbers.get(key, key) if isinstance(key, torch.Tensor) else key for key in leaf.path): torch.as_tensor(
            leaf.value
        )
        .detach()
        .cpu()
        .clone()
        for leaf in reader.leaves(optimizer)
        if isinstance(leaf.value, torch.Tensor | int | float) and leaf.key not in ("capturable", "fused")
    }


def train(device, make, scaler, compiled=False):
    """What an optimizer holds after each of `FACTORS`."""
    params = [torch.nn.Parameter(torch.linspace(0.5, 1, 3).to(device)) for _ in range(2)]
    optimizer, found = make(params), []
    frozen = params.pop()
    if isinstance(optimizer, Centralized):
        frozen.requires_grad_(False)

    def step(factor):
        optimizer.zero_grad()
        scaler.scale((params[0].square() * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    called = xla_amp.compile(step, state=[optimizer, scaler]) if compiled else step
    for factor in FACTORS:
        factor = torch.tensor(factor).to(device)
        called(factor)
        xla_amp.sync()
        found.append(values(optimizer))
    return found, getattr(called, "replays", None)


@pytest.mark.filterwarnings("ignore:.*so each step waits for the device")
@pytest.mark.filterwarnings("ignore:.*cannot be replayed")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_skipped_step_leaves_no_trace(form, compiled):
    make, on_device = FORMS[form]
    if compiled and not on_device:
        pytest.skip("each call is recorded: it reads the flag")
    device = xla_amp.xla_device()
    expected, _ = train("cpu", make, torch.amp.GradScaler("cpu", init_scale=8.0))
    found, replays = train(device, make, xla_amp.GradScaler(init_scale=8.0), compiled)
    for number, factor in enumerate(FACTORS):
        if number and not factor < 4:  # inf or NaN
            assert found[number].keys() == found[number - 1].keys()
            assert all(torch.equal(value, found[number - 1][path]) for path, value in found[number].items())
        torch.testing.assert_close(
            [value.double() for path, value in found[number].items() if path in expected[number]],
            [value.double() for path, value in expected[number].items() if path in found[number]],
            rtol=1e-5,
            atol=1e-6,
        )
    assert expected[-1].keys() <= found[-1].keys()
    if compiled and form != "binding":
        assert replays >= 2


@pytest.mark.parametrize("form", [form for form, (_, on_device) in FORMS.items() if on_device])
def test_where_the_device_decides_a_step_is_one_program_and_does_not_wait(form):
    params = [torch.nn.Parameter(torch.ones(3, device=xla_amp.xla_device())) for _ in range(2)]
    params[1].requires_grad_(form != "centralized")
    optimizer, scaler = FORMS[form][0](params), xla_amp.GradScaler(init_scale=8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(6):
            optimizer.zero_grad()
            xla_amp.sync()
            with counted() as counts:
                scaler.scale(params[0].square().sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                xla_amp.sync()
            if number >= 2:
                assert (counts.host_syncs, counts.executions) == (0, 1)


def test_two_optimizers_and_a_nested_step_that_is_skipped_inside():
    """Of two optimizers with one scaler one is skipped; an outer step with its own flag holds a wrapped one."""
    device = xla_amp.xla_device()
    first, second = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    inner = xla_amp.syncfree.wrap(torch.optim.RMSprop([second], lr=0.5))
    one, outer = DecayAll([first]), xla_amp.syncfree.wrap(Around(inner))
    scaler = xla_amp.GradScaler(init_scale=8.0)
    for number in range(4):
        scaler.scale(first.sum() + second.sum() * (float("inf") if number == 3 else 1.0)).backward()
        before = first.tolist(), second.tolist(), values(outer)
        for optimizer in (one, outer):
            scaler.step(optimizer)
        scaler.update()
        assert first.tolist() != before[0]
        assert (second.tolist() == before[1]) is (number == 3)
        for optimizer in (one, outer):
            optimizer.zero_grad()
    assert all(torch.equal(value, before[2][path]) for path, value in values(outer).items())


def test_a_value_on_the_host_that_changes_late_is_restored():
    class Late(Plain):
        warm, calls = True, []

        @torch.no_grad()
        def step(self, closure=None):
            self.calls.append(1)
            if len(self.calls) == 4:
                self.warm = False
                self.extra = torch.zeros_like(self.params[0])
            self.params[0].sub_(0.1 * self.params[0].grad)

    weight = torch.nn.Parameter(torch.ones(3, device=xla_amp.xla_device()))
    optimizer = xla_amp.syncfree.wrap(Late([weight]))
    for number in range(4):
        weight.grad = torch.ones_like(weight)
        optimizer.step(found_inf=torch.tensor(float(number == 3)).to(weight.device))
    assert len(Late.calls) == 4  # the device decides, so it was called
    assert optimizer.warm
    assert not hasattr(optimizer, "extra")
    torch.testing.assert_close(weight.detach().cpu(), torch.full((3,), 0.7))
    optimizer.step()
    assert len(Late.calls) == 5


def test_a_step_that_fails_because_it_should_be_skipped():
    class Failing(Plain):
        bad = False

        @torch.no_grad()
        def step(self, closure=None):
            self.params[0].add_(1)
            if self.bad:
                raise ValueError("of this step")

    weight = torch.nn.Parameter(torch.ones(3, device=xla_amp.xla_device()))
    optimizer = xla_amp.syncfree.wrap(Failing([weight]))
    for flag in (0.0, 0.0, 1.0):
        weight.grad, optimizer.bad = torch.ones_like(weight), flag == 1
        optimizer.step(found_inf=torch.tensor(flag).to(weight.device))
    assert weight.tolist() == [3, 3, 3]
    for _ in range(2):  # the host decides again, then the device
        optimizer.bad = False
        optimizer.step(found_inf=torch.zeros((), device=weight.device))
    optimizer.bad = True
    with pytest.raises(ValueError, match="of this step"):
        optimizer.step(found_inf=torch.zeros((), device=weight.device))
