"""Captured steps: replays are bitwise what recording gives, and what cannot be replayed is named."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import random
import re
import sys
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from harness import replaying
from torch import nn

import xla_amp
from xla_amp import syncfree
from xla_amp.errors import CaptureError


def test_a_replay_records_nothing_and_runs_one_executable(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)).to(device)
    optimizer, x = syncfree.AdamW(model.parameters()), torch.ones(3, 4, device=device)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = replaying(step, x)
    before = xla_amp.metrics()
    seen = []
    sys.setprofile(lambda frame, *_: seen.append(frame.f_code) if frame.f_code.co_name == "forward" else None)
    for _ in range(3):
        step(x)
    sys.setprofile(None)
    after = xla_amp.metrics()
    assert seen == []
    changed = {name: after[name] - before[name] for name in after if name != "operations"}
    assert changed == dict.fromkeys(changed, 0) | {"executions": 3}


def test_another_shape_mode_or_region_is_another_capture(device, low_of):
    model = nn.Dropout(0.5).to(device)
    step = xla_amp.compile(lambda x: model(x), strict=True)
    big = torch.ones(64, device=device)
    for _ in range(4):
        step(big)
    assert step(big).count_nonzero().item() < 64
    model.eval()
    assert step(big).count_nonzero().item() == 64
    assert step(torch.ones(3, device=device)).tolist() == [1.0, 1.0, 1.0]
    product = xla_amp.compile(lambda x: x @ x, strict=True)
    matrix = torch.ones(2, 2, device=device)
    for _ in range(4):
        assert product(matrix).dtype is torch.float32
    with xla_amp.autocast(device):
        assert product(matrix).dtype is low_of(device)
        with xla_amp.policy.override(matmul="fp32"):
            assert product(matrix).dtype is torch.float32


def counter_in_c():
    """A function that counts its calls where no Python value shows it: in an option of the garbage collector."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1000)

    def number():
        *others, count = gc.get_threshold()
        gc.set_threshold(*others, count + 1)
        return count - 1000

    return number


@dataclasses.dataclass
class Scores:
    """What a step may return, of a class that pytrees do not know."""

    values: torch.Tensor


def tensor_of(result):
    """The first tensor of what a step returned."""
    return result.values if isinstance(result, Scores) else result[0] if isinstance(result, tuple) else result


def item(device):
    return lambda x: x * x.sum().item(), r"reads a value on the host at .*test_compile\.py:\d+"


def object_with_a_tensor(device):
    return lambda x: Scores(x * 2), "returns or binds a Python value or tensor that is another one"


def counter(device):
    count = 0

    def step(x):
        nonlocal count
        count += 1
        return x * (2 if count in (1, 20) else 3)

    return step, r"it changes count from \d to \d and reads it at .*test_compile\.py:\d+"


def optimizers_count(device):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for state in map(self.state.__getitem__, self.param_groups[0]["params"]):
                state["n"] = state.get("n", 0) + 1
            return super().step(closure)

    optimizer = Counting([nn.Parameter(torch.ones(2, device=device))], lr=0.5)
    return training(optimizer), r"it changes the 'n' of .* which a replay would not; keep it in a tensor on the device"


def growing_list(device):
    losses = []
    return lambda x: losses.append(x * 2), r"it changes losses\[\d\], which a replay would not"


def number_from_elsewhere(device):
    number = counter_in_c()
    words = r"Python computes \d\.5 for mul.*, a number that changes from call to call \(\d\.5 before\)"
    return lambda x: x * (number() + 0.5), words


def value_from_the_host(device):
    number = counter_in_c()
    return lambda x: x + torch.tensor([number(), 2]).to(device), "reads a tensor that is another one in each call"


def other_operations(device):
    number = counter_in_c()
    return lambda x: x.exp() if number() % 2 else x.sin(), "operation 1 is .*, .* before"


def training(optimizer, more=lambda: None, times=1):
    weight = optimizer.param_groups[0]["params"][0]

    def step(x):
        for _ in range(times):
            (weight * x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            more()
        return weight.detach() * 1

    return step


class Counting(torch.optim.Adam):
    """Counts on the host."""

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            count = self.state[weight].setdefault("step", torch.zeros(()))
            count += 1
            weight.sub_(weight.grad / 8)


def host_state(device):
    optimizer = Counting([nn.Parameter(torch.ones(2, device=device))])
    return training(optimizer), r"changes the 'step' of .* \(on the host; make it a tensor: .*\) from .* to "


def schedule_before_its_optimizer(device):
    optimizer = syncfree.SGD([nn.Parameter(torch.ones(2, device=device))], lr=0.5)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5 ** (number % 2))
    step = training(optimizer, lambda: rates.step(), times=2)
    return lambda x: (step(x), rates.optimizer)[0], "it steps rates before its optimizer.*step it afterwards"


def schedule_by_a_method_that_was_kept(device):
    optimizer = syncfree.SGD([nn.Parameter(torch.ones(2, device=device))], lr=0.5)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    step = training(optimizer, rates.step)
    return lambda x: (step(x), rates.optimizer)[0], r"it changes rates\.last_epoch from \d to \d"


def schedule_by_a_metric(device):
    optimizer = syncfree.SGD([nn.Parameter(torch.ones(2, device=device))], lr=0.5)
    rates = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    step = training(optimizer, lambda: rates.step(1.0))
    return lambda x: (step(x), rates.optimizer)[0], r"it steps rates \(a ReduceLROnPlateau\) with a metric"


def rate_that_is_set_beside_a_schedule(device):
    optimizer = syncfree.SGD([nn.Parameter(torch.ones(2, device=device))], lr=0.5)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1000)

    def more():
        rates.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    step = training(optimizer, more)
    return lambda x: (step(x), rates.optimizer)[0], r"it changes .*\['lr'\] from \S+ to .* do that outside"


def host_result(device):
    return lambda x: (x + 1, torch.ones(2)), "returns a tensor on cpu"


def graph(device):
    weight = nn.Parameter(torch.ones(2, device=device))
    return lambda x: (weight * x).sum(), "returns a tensor that requires grad"


def seeds(device):
    def step(x):
        torch.manual_seed(1)
        return x + torch.rand_like(x)

    return step, "seeds the random generator"


def layer_drop(device):
    return lambda x: x * 2 if torch.rand([]) < 0.5 else x, "it draws from torch's CPU generator on the host"


def stochastic_depth(device):
    return lambda x: x * 2 if random.random() < 0.5 else x, "it draws from `random` on the host"


def mixup(device):
    return lambda x: x * 2 if np.random.beta(0.4, 0.4) < 0.5 else x, "it draws from NumPy's generator on the host"


REFUSALS = [
    item, object_with_a_tensor, counter, optimizers_count, growing_list, number_from_elsewhere, value_from_the_host,
    other_operations, host_state, schedule_before_its_optimizer, schedule_by_a_metric,
    rate_that_is_set_beside_a_schedule, schedule_by_a_method_that_was_kept, graph, seeds, host_result, layer_drop,
    stochastic_depth, mixup,
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: each.__name__)
def test_what_cannot_be_replayed_stays_recorded_with_one_warning(refusal, device):
    def results(step, call=lambda step: step(torch.ones(2, device=device))):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return [tensor_of(call(step)) for _ in range(10)]

    compiled, words = xla_amp.compile(refusal(device)[0]), refusal(device)[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = results(compiled)
    for one, other in zip(found, results(refusal(device)[0]), strict=True):
        assert (one is None) == (other is None)
        assert one is None or one.tolist() == other.tolist()
    (warning,) = [str(each.message) for each in caught if "Each call is recorded" in str(each.message)]
    assert re.search(words, warning)
    assert (len(compiled.reasons), compiled.replays) == (1, 0)
    with pytest.raises(CaptureError, match=words):
        results(xla_amp.compile(refusal(device)[0], strict=True))


@pytest.mark.parametrize(("kind", "said"), [(int, ""), (Fraction, r" \(a Fraction, compared by ==\)")])
def test_captures_are_bounded(device, kind, said):
    step, x = xla_amp.compile(lambda x, n: x + float(n), limit=2), torch.zeros(2, device=device)
    with pytest.warns(UserWarning, match=f"captured 2 times, its limit; argument 1{said} changed from 1 to 2"):
        assert [step(x, kind(n)).tolist()[0] for n in range(5)] == [0, 1, 2, 3, 4]


def test_a_constant_that_is_nan_does_not_change(device):
    """As in the formula of `kl_div`."""
    step = xla_amp.compile(lambda x: torch.where(x.isnan(), float("nan"), x * 2), strict=True)
    x = torch.tensor([float("nan"), 1.0], device=device)
    assert [repr(step(x).tolist()) for _ in range(4)] == ["[nan, 2.0]"] * 4
    assert step.replays == 2


def test_a_capture_that_has_replayed_makes_room(device):
    step, x = xla_amp.compile(lambda x, n: x + n, limit=2, strict=True), torch.zeros(2, device=device)
    numbers = [epoch for epoch in range(5) for _ in range(4)]
    assert [step(x, n).tolist()[0] for n in numbers] == numbers
    assert (step.replays, len(step._own.cache)) == (10, 2)
    with pytest.raises(CaptureError, match="its limit; argument 1 changed from 6 to 7"):
        [step(x, n) for n in range(3, 9)]


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: xla_amp.compile(3), TypeError, "compile.. expects a function, got 3"),
        (lambda: xla_amp.compile(len, limit=0), ValueError, "expected at least 1"),
        (lambda: xla_amp.compile(len, state=nn.Linear(1, 1)), TypeError, "list of objects, got a Linear; type state="),
        (lambda: xla_amp.compile(abs)(torch.ones(2)), TypeError, r"expects dense tensors on 'jax', got one on cpu"),
        (
            lambda: xla_amp.compile(abs)(torch.ones(2).to_sparse().to(xla_amp.xla_device())),
            TypeError,
            r"expects dense tensors.*torch.sparse_coo.*call tensor.to.* or to_dense\(\)",
        ),
    ],
)
def test_bad_input(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_explain_sees_every_operation(device):
    step = replaying(lambda x: x @ x, torch.ones(2, 2, device=device))
    with xla_amp.explain() as report, xla_amp.autocast(device):
        step(torch.ones(2, 2, device=device))
    assert [row["operation"] for row in report.rows()] == ["matmul"]


@xla_amp.compile
def doubled(x):
    return x * 2


def test_copies_and_pickles_are_those_of_a_function(device):
    """A captured step is atomic in `copy`, and pickled by its name, as what ``torch.compile`` makes of a function."""
    x = torch.ones(3, device=device)
    for _ in range(5):
        doubled(x)
    assert doubled.replays
    holder = copy.deepcopy({"step": doubled})
    assert holder["step"] is doubled
    assert copy.copy(doubled) is doubled
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"local object|not found"):
        pickle.dumps(xla_amp.compile(lambda x: x))
