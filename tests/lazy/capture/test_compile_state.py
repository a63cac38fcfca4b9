"""State of a captured step: reads and writes between replays see and change the right values."""

from __future__ import annotations

import gc
import types
import warnings
import weakref

import pytest
import torch
from harness import replaying
from torch import nn

import xla_amp
from xla_amp.errors import CaptureError, StepFailedError
from xla_amp.lazy.programs import execute
from xla_amp.lazy.tensors import tensor_io
from xla_amp.torch_common.trees import tree_leaves


class Counter:
    """A value that lives on, another that is only read, and a step that adds the one to the other."""

    def __init__(self, device):
        self.total = torch.zeros(3, device=device)
        self.by = torch.ones(3, device=device)
        self.step = replaying(self.add)

    def add(self):
        self.total.add_(self.by)


CHANGES = {
    "an operation that reads it": lambda c: c.total.mul_(2),
    "an operation that does not": lambda c: c.total.fill_(7),
    "a whole upload": lambda c: c.total.copy_(torch.full((3,), 7.0)),
    "an upload of what is only read": lambda c: c.by.copy_(torch.full((3,), 5.0)),
    "a copy from elsewhere": lambda c: c.total.copy_(c.by * 4),
    "part of it": lambda c: c.total[1:].zero_(),
    "a view": lambda c: c.total.view(3, 1).add_(1),
    "the other way round": lambda c: c.by.copy_(c.total),
    "other memory": lambda c: setattr(c.total, "data", c.by * 3),
    "another captured step": lambda c: replaying(lambda: c.total.add_(c.by)),
    "only looking": lambda c: c.total.tolist(),
    "nothing": lambda c: None,
    "a sync": lambda c: xla_amp.sync(wait=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_replays_counts(name, device):
    counter, total, by = Counter(device), torch.zeros(3), torch.ones(3)
    for _ in range(counter.step.replays + 2):
        total += by
    reference = type("", (), {"total": total, "by": by})
    for _ in range(2):
        CHANGES[name](counter)
        if name == "another captured step":
            total += 3 * by
        elif name != "a sync":
            CHANGES[name](reference)
        before = counter.step.replays
        counter.step()
        reference.total += reference.by
        assert counter.step.replays == before + 1 or name == "other memory"
    assert counter.total.tolist() == reference.total.tolist()
    assert counter.by.tolist() == reference.by.tolist()


STEPS = {
    "an argument that it overwrites": lambda x, total: x.add_(1),
    "an argument that it only writes": lambda x, total: x.zero_() + 1,
    "an argument that it does not read": lambda x, total: (x * 2, total.add_(1) * 1)[1],
    "a result that is also state": lambda x, total: total.add_(1).clone(),
    "views": lambda x, total: (x, x.view(-1), x[1:], (x + 1).view(torch.int32), (x * 2)[:, 1], (x * 2).t()),
}


@pytest.mark.parametrize("name", STEPS)
def test_arguments_and_results_are_those_of_the_cpu(name, device):
    call, state, on_cpu, every = STEPS[name], torch.zeros(2, 2, device=device), torch.zeros(2, 2), []
    step = xla_amp.compile(lambda x: call(x, state), strict=True)
    for number in range(7):
        y = torch.arange(4.0).view(2, 2) + number
        x = y.to(device)
        copy, kept = x.clone(), y.clone()
        every.append((step(x), call(y, on_cpu)))
        assert (every[-1][0] is x) == (every[-1][1] is y)
        for given, result in zip((x, y), every[-1], strict=True):  # a write to what shares memory with an argument
            (result[1] if isinstance(result, tuple) else result).add_(given.sum())
        assert [x.tolist(), copy.tolist(), state.tolist()] == [y.tolist(), kept.tolist(), on_cpu.tolist()]
    for found, expected in every:  # no later call has changed it
        for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            assert one.tolist() == other.tolist()
    assert step.replays >= 4


class Kept:
    """Steps that bind tensors to attributes: what they keep must be what recording keeps."""

    def __init__(self, device):
        self.current, self.previous = torch.zeros(2, device=device), torch.zeros(2, device=device)
        self.history = {"current": self.current}
        self.pair = self.previous, self.current

    def last_result(self, x):
        self.current = (x * 3).detach()
        return x * 2

    def returned(self, x):
        self.current = self.current * 0.5 + x
        return self.current

    def in_a_dict(self, x):
        self.history["current"] = self.history["current"] + x
        return self.history["current"] * 2

    def in_a_tuple(self, x):
        self.pair = self.pair[0] + x, self.pair[1]
        return self.pair[0] * 2

    def shifted(self, x):
        self.previous, self.current = self.current, self.current + x
        return self.current * 1

    def shifted_unread(self, x):
        self.previous, self.current = self.current, x * 2
        return self.current * 1

    def exchanged(self, x):
        self.previous, self.current = self.current, self.previous
        self.current.add_(x)
        return self.current * 1

    def tensors(self):
        return [value.tolist() for value in (self.current, self.previous, *self.pair, self.history["current"])]


@pytest.mark.parametrize(
    "name", ["last_result", "returned", "in_a_dict", "in_a_tuple", "shifted", "shifted_unread", "exchanged"]
)
def test_what_a_step_binds_is_never_stale(name, device):
    one, other = Kept(device), Kept(device)
    step, results = xla_amp.compile(getattr(one, name)), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(14):  # beyond the first comparison
            x = torch.full((2,), float(number), device=device)
            results.append((step(x), getattr(other, name)(x)))
            assert one.tensors() == other.tensors()
    assert all(torch.equal(found, expected) for found, expected in results)  # no replay has overwritten one
    assert (step.replays >= 9, step.reasons) == (True, [])  # two or three to record, two to compare


def test_tensors_bound_where_no_state_is(device):
    """An object two levels deep is state if it is declared."""
    keeper = types.SimpleNamespace(inner=types.SimpleNamespace(last=torch.zeros(2, device=device), every=[]))

    def step(x):
        keeper.inner.last = x * 2
        return x + 1

    compiled = xla_amp.compile(step, state=[keeper.inner], strict=True)
    for number in range(6):
        compiled(torch.full((2,), float(number), device=device))
        assert keeper.inner.last.tolist() == [2.0 * number] * 2
    assert compiled.replays == 4
    for keep in (step, lambda x: keeper.inner.every.append(x * 3)):
        with pytest.raises(CaptureError, match=r"keeps a tensor, float32\[2\], in an object that is not its .*state="):
            replaying(keep, torch.ones(2, device=device))


class Counting:
    """Steps that count; what they return and count must be what recording returns and counts."""

    every = 3

    def __init__(self, device):
        self.total = torch.zeros(2, device=device)
        self.n = self.seen = 0
        self.host = torch.tensor(3)

    def counts(self, x):
        self.n += 1
        self.seen += x.size(0)
        return x * 2

    def accumulates(self, x):
        self.total.add_(x)
        if (self.n + 1) % self.every == 0:
            self.total.mul_(0.5)
        self.n += 1
        return self.total * 1

    def begins_later(self, x):
        self.n += 1
        return x * 2 if self.late else x * 1

    @property
    def late(self):
        return self.n > 9

    def starts_again(self, x):
        self.n += 1
        if self.n == 6:
            self.n = 0
            return x * 3
        return x * 1

    def in_methods(self, x):
        self.counts(x)
        return self.begins_later(x)

    def on_the_host(self, x):
        scaled = x * 2 if self.host > 12 else x * 1
        self.host += 1
        return scaled

    def as_a_result(self, x):
        self.n += 1
        return x * 1, self.n

    def in_a_list(self, x):
        self.n += 1
        return x * [1.0, 1.0, 1.0, 2.0][min(self.n // 3, 3)]


COUNTING = {
    "counts": 0, "accumulates": 0, "begins_later": 0, "starts_again": 0, "in_methods": 0, "on_the_host": 0,
    "as_a_result": "n", "in_a_list": "n",
}  # fmt: skip
"""What is read otherwise than to decide, so that each call is recorded."""


@pytest.mark.filterwarnings("ignore:.*cannot be replayed. it changes self.n from .* and reads it at")
@pytest.mark.parametrize("name", COUNTING)
def test_what_a_step_counts_is_never_stale(name, device):
    one, other = Counting(device), Counting(device)
    step = xla_amp.compile(getattr(one, name))
    for number in range(24):
        if number == 17:
            one.n = other.n = 4
            one.every = other.every = 2
        x = torch.full((2,), float(number), device=device)
        for found, expected in zip(*(tree_leaves(call(x)) for call in (step, getattr(other, name))), strict=True):
            assert found is expected or found.tolist() == expected.tolist()
        assert (one.n, one.seen, one.host.item()) == (other.n, other.seen, other.host.item())
    assert (step.replays == 0) == bool(COUNTING[name]) == bool(step.reasons)


def test_a_gradient_that_shares_memory_is_another_capture(device):
    weight = nn.Parameter(torch.ones(2, device=device))
    held = torch.ones(2, device=device)

    def step(x):
        (weight * x).sum().backward()
        held.mul_(2)
        return weight.grad.detach() + held

    compiled, x = xla_amp.compile(step, strict=True), torch.ones(2, device=device)
    for number in range(10):
        held.fill_(1)
        weight.grad = held if number in (5, 8) else torch.ones(2, device=device)
        assert compiled(x).tolist() == [8.0 if number in (5, 8) else 4.0] * 2
    assert compiled.replays >= 4


@pytest.mark.parametrize("dropped", [False, True], ids=["accumulates", "reads and drops"])
def test_a_gradient_that_is_replaced_outside(dropped, device):
    def train(compile):
        weight = nn.Parameter(torch.ones(2, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def accumulate(x):
            (weight * x).sum().backward()

        def update(x):
            optimizer.step()
            optimizer.zero_grad()

        step, found, kept = compile(update if dropped else accumulate), [], []
        gradient = torch.ones(2, device=device)
        for number in range(14):
            if dropped:
                weight.grad = gradient
            if number in (5, 8):
                kept.append(weight.grad)
                weight.grad = torch.full((2,), 100.0 + number, device=device)
            step(torch.full((2,), float(number), device=device))
            found.append((weight.tolist(), None if weight.grad is None else weight.grad.tolist()))
        return found, step

    found, step = train(lambda function: xla_amp.compile(function, strict=True))
    expected, _ = train(lambda function: function)
    assert found == expected
    assert step.replays >= 3


def test_state_that_is_replaced_is_freed_and_the_next_one_counts(device):
    class Owner:
        def __init__(self):
            self.state = {"total": torch.zeros(3, device=device)}

        def add(self, x):
            self.state["total"].add_(x)

    owner = Owner()
    x = torch.ones(3, device=device)
    step = replaying(owner.add, x)
    array = weakref.ref(tensor_io.buffer_of(owner.state["total"]).array)
    assert array() is not None
    owner.state["total"] = torch.ones(3, device=device)
    gc.collect()
    assert array() is None
    step(x)
    assert step.replays == 2
    assert owner.state["total"].tolist() == [2.0] * 3


@pytest.mark.parametrize("taken", [True, False])
def test_a_failed_replay_loses_the_values_whose_memory_it_had_taken(taken, device, monkeypatch):
    total, x = torch.zeros(3, device=device), torch.ones(3, device=device)
    step = replaying(lambda x: total.add_(x), x)
    before = total.tolist()
    shared = None if taken else total.clone()  # of the same array, which the next replay may not take
    xla_amp.sync()

    def fail(program, donated, *_):
        for array in donated if taken else ():
            array.delete()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(execute, "dispatch", fail)
    with pytest.raises(StepFailedError, match="out of memory"):
        step(x)
    assert x.tolist() == [1.0] * 3
    if taken:
        with pytest.raises(StepFailedError, match="memory was handed to a step that then failed"):
            total.tolist()
        return
    assert total.tolist() == before
    monkeypatch.undo()
    step(x)
    assert step.replays == 2
    assert total.tolist() == [before[0] + 1] * 3
    assert shared.tolist() == before


class Named(torch.optim.Optimizer):
    """Moments in an attribute, a count on the device by its name, and one in Python."""

    def __init__(self, params, every=0):
        super().__init__(params, {})
        self.moments = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]
        self.state["n"] = torch.zeros((), device=self.moments[0].device)
        self.every, self.count = every, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["n"] += 1
        self.count += bool(self.every)
        slow = self.every and self.count % self.every == 0
        for p, moment in zip(self.param_groups[0]["params"], self.moments, strict=True):
            moment.mul_(0.9).add_(p.grad)
            p.sub_((0.5 if slow else 0.1) * moment / self.state["n"])


@pytest.mark.parametrize("every", [0, 5])
def test_an_optimizer_with_state_in_attributes_and_by_name(device, every):
    """It is replaced between calls as a checkpoint does; a count in Python decides what its step does."""

    def run(device, compiled=False):
        weight = nn.Parameter(torch.ones(3).to(device))
        optimizer, found = Named([weight], every), []

        def step():
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()

        call = xla_amp.compile(step, state=[optimizer]) if compiled else step
        for number in range(20):
            if number == 5:
                optimizer.moments, kept = [torch.full((3,), 0.5).to(device)], optimizer.moments
                optimizer.state["n"] = torch.ones(()).to(device)
            call()
            found.append(weight.detach().cpu().clone())
        assert kept[0] is not optimizer.moments[0]
        return found, getattr(call, "replays", None)

    found, replays = run(device, compiled=True)
    torch.testing.assert_close(found, run("cpu")[0])
    assert replays >= 7  # the first call begins without gradients


@pytest.mark.parametrize("alive", [False, True], ids=["collected as garbage", "collected before"])
def test_when_garbage_is_freed_makes_no_difference(device, alive):
    calls = iter([False, True, False, True, True])

    def step(x):
        cycle = [x * 2]
        cycle.append(cycle)
        if alive and next(calls):
            gc.collect()
        del cycle
        if not alive and next(calls):
            gc.collect()
        return x + 1

    step, x = xla_amp.compile(step, strict=True), torch.ones(3, device=device)
    assert [step(x).tolist() for _ in range(4)] == [[2.0] * 3] * 4
    assert step.replays == 2
    assert gc.isenabled()


@pytest.mark.parametrize("in_cpp", [True, False])
@pytest.mark.parametrize("change", [lambda data: data.t(), lambda data: data[1:], lambda data: data.view(torch.int32)])
def test_a_tensor_that_becomes_another_part_of_its_memory_is_another_capture(device, change, in_cpp, monkeypatch):
    if not in_cpp:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    model, x = nn.Module(), torch.ones(3, device=device)
    model.register_buffer("table", torch.arange(9.0, device=device).reshape(3, 3))

    def step(x):
        return (model.table.float() * x).sum(1)

    step = replaying(step, x)
    model.table.data = change(model.table.data)
    expected = (model.table.cpu().float() * x.cpu()).sum(1)
    assert [step(x).tolist() for _ in range(4)] == [expected.tolist()] * 4


def test_state_is_not_read_again_where_modes_alternate(device):
    model, x = nn.Linear(3, 2).to(device), torch.ones(4, 3, device=device)
    step = xla_amp.compile(lambda x: model(x).sum(), strict=True)
    modes = (torch.no_grad, torch.inference_mode, lambda: xla_amp.autocast(device, dtype=torch.bfloat16))

    def call():
        values = []
        for mode in modes:
            with torch.no_grad(), mode():
                values.append(step(x).item())
        return values

    *_, expected = [call() for _ in range(4)]
    found, replays = step._own.state._objects, step.replays
    assert [call() for _ in range(2)] == [expected] * 2
    assert (step._own.state._objects, step.replays) == (found, replays + 6)


def test_a_parameter_that_moves_to_another_group_is_another_capture(device):
    one, two, three = (nn.Parameter(torch.zeros(2, device=device)) for _ in range(3))
    optimizer = xla_amp.syncfree.SGD([{"params": [one, two], "lr": 1.0}, {"params": [three], "lr": 2.0}])

    def step(x):
        optimizer.zero_grad()
        ((one + two + three) * x).sum().backward()
        optimizer.step()

    x = torch.ones(2, device=device)
    step = replaying(step, x)
    for parameter in (one, two, three):
        parameter.data.zero_()
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())
    step(x)
    assert [parameter.tolist() for parameter in (one, two, three)] == [[-1.0] * 2, [-2.0] * 2, [-2.0] * 2]
